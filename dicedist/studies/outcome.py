"""The outcome of a search: a table, the best config as an experiment, a page. No test input is used."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

from dicedist.config.compose import groups
from dicedist.console.lines import say
from dicedist.console.tables import table
from dicedist.reporting.search import OUTCOMES, Attempt, search_page
from dicedist.runs.files import replace_text
from dicedist.studies.search import Search

if TYPE_CHECKING:
    import optuna

MOST_SHOWN = 20


def conclude(search: Search) -> dict[str, str]:
    """Print and write the results of the search. Return the values of its best trial."""
    plan, winner, attempts = search.plan, search.best()[0], attempts_of(search)
    best = search.written(winner.params)
    say(f"\n{shown(search, attempts)}")
    overrides = dict(override.split("=", 1) for override in plan.fixed) | best
    figures = plan.figures(winner.values)
    remark = f"The best of {len(attempts)} trials on validation inputs (trial {winner.number}): {figures}."
    experiment, page = plan.directory / "best.yaml", plan.directory / "search.html"
    write_experiment(experiment, overrides, remark, groups())
    replace_text(page, search_page(plan.objectives, attempts, importance(search.study)))
    say(f"best: {' '.join(f'{key}={value}' for key, value in best.items())}")
    say(f"as an experiment: {experiment}, figures: {page}")
    return best


def attempts_of(search: Search) -> list[Attempt]:
    winners, scales = {trial.number for trial in search.best()}, [o.measure.scale for o in search.plan.objectives]
    return [
        Attempt(
            trial.number,
            outcome,
            search.written(trial.params),
            {key: value for key, value in trial.params.items() if isinstance(value, int | float)},
            # Optuna gives a pruned trial its last value.
            [s * v for s, v in zip(scales, trial.values, strict=True)] if outcome == "complete" else [],
            [(float(epoch), scales[0] * value) for epoch, value in sorted(trial.intermediate_values.items())],
            trial.number in winners,
            trial.user_attrs.get("reason", ""),
        )
        for trial, outcome in zip(search.study.get_trials(deepcopy=False), search.outcomes(), strict=True)
    ]


def shown(search: Search, attempts: Sequence[Attempt]) -> str:
    """Format the best trials as a table, with the number of trials of each outcome."""
    objectives, keys = search.plan.objectives, list(search.plan.spaces)
    sign = -1 if objectives[0].direction == "maximize" else 1
    complete = sorted((one for one in attempts if one.values), key=lambda one: sign * one.values[0])
    rows = [
        [one.number, *one.values, *(one.written[key] for key in keys), "best" if one.is_best else ""]
        for one in complete[:MOST_SHOWN]
    ]
    states = [one.state for one in attempts]
    counted = ", ".join(f"{states.count(state)} {words}" for state, words in OUTCOMES.items() if state in states)
    head = ["trial", *(f"{objective.title}, validation" for objective in objectives), *keys, ""]
    return f"{table(head, rows)}\n{len(attempts)} trials: {counted}"


def importance(study: "optuna.Study") -> dict[str, float]:
    """Return the importance of each key; empty for too few trials or several objectives."""
    import optuna

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(study.directions) > 1 or len(complete) < 4 or len(complete[0].params) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def write_experiment(path: Path, overrides: Mapping[str, str], remark: str, groups: Collection[str]) -> None:
    """Write these values as a file for conf/experiment/, without the keys that name a run or its records."""
    kept = {key: text for key, text in overrides.items() if not key.startswith(("run.", "tracking", "resum"))}
    defaults: list[Any] = [kept.pop("experiment")] if "experiment" in kept else []
    defaults.append("_self_")
    defaults += [{f"override /{key}": kept.pop(key)} for key in sorted(kept.keys() & set(groups))]
    nested = OmegaConf.create()
    for key, text in kept.items():
        OmegaConf.update(nested, key, yaml.safe_load(text))
    text = yaml.safe_dump({"defaults": defaults}, sort_keys=False) + (OmegaConf.to_yaml(nested) if kept else "")
    replace_text(path, f"# @package _global_\n# {remark}\n\n{text}")
