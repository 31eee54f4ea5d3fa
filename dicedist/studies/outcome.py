"""What a search has found: a table, the best config as an experiment, a page. None of it knows a test input."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dicedist.config.compose import CONF
from dicedist.console.lines import say
from dicedist.console.tables import table
from dicedist.reporting.search import OUTCOMES, Aim, Attempt, write_search_page
from dicedist.runs.files import replace_text
from dicedist.studies.search import Search, unexperimental

if TYPE_CHECKING:
    import optuna

MOST_SHOWN = 20


def conclude(search: Search) -> dict[str, str]:
    """Prints and writes what the search has come to; the values of its best trial."""
    plan, best = search.plan, search.best_values()
    attempts = [attempt(search, trial) for trial in search.study.get_trials(deepcopy=False)]
    winners = [trial.number for trial in search.best()]
    say(f"\n{shown(search, attempts, winners)}")
    overrides = dict(override.split("=", 1) for override in plan.fixed) | best
    figures = plan.figures(attempts[winners[0]].values)
    remark = f"The best of {len(attempts)} trials on validation inputs (trial {winners[0]}): {figures}."
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    write_experiment(plan.directory / "best.yaml", overrides, remark, groups)
    aims = [Aim(objective.title, objective.measure) for objective in plan.objectives]
    write_search_page(aims, attempts, winners, importance(search.study), plan.directory / "search.html")
    say(f"best: {' '.join(f'{key}={value}' for key, value in best.items())}")
    say(f"as an experiment: {plan.directory / 'best.yaml'}, figures: {plan.directory / 'search.html'}")
    return best


def attempt(search: Search, trial: "optuna.trial.FrozenTrial") -> Attempt:
    course, outcome = sorted(trial.intermediate_values.items()), search.outcomes()[trial.number]
    return Attempt(
        trial.number,
        outcome,
        search.written(trial.params),
        {key: value for key, value in trial.params.items() if isinstance(value, int | float)},
        list(trial.values) if outcome == "complete" else [],  # Optuna gives what was pruned its last value
        [(float(epoch), value) for epoch, value in course],
        trial.user_attrs.get("reason", ""),
    )


def shown(search: Search, attempts: list[Attempt], winners: Collection[int]) -> str:
    """The best ones, and how many there were of each kind."""
    objectives, keys = search.plan.objectives, list(search.plan.spaces)
    sign = -1 if objectives[0].direction == "maximize" else 1
    complete = sorted((one for one in attempts if one.values), key=lambda one: sign * one.values[0])
    rows = [
        [
            one.number,
            *(o.measure.scale * value for o, value in zip(objectives, one.values, strict=True)),
            *(one.written[key] for key in keys),
            "best" if one.number in winners else "",
        ]
        for one in complete[:MOST_SHOWN]
    ]
    states = [one.state for one in attempts]
    counted = ", ".join(f"{states.count(state)} {words}" for state, words in OUTCOMES.items() if state in states)
    head = ["trial", *(f"{objective.title}, validation" for objective in objectives), *keys, ""]
    return f"{table(head, rows)}\n{len(attempts)} trials: {counted}"


def importance(study: "optuna.Study") -> dict[str, float]:
    """The share of each key in being among the better trials; empty if there are too few, or several objectives."""
    import optuna

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(study.directions) > 1 or len(complete) < 4 or len(complete[0].params) < 2:
        return {}
    with unexperimental():
        return optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        )


def write_experiment(path: Path, overrides: Mapping[str, str], remark: str, groups: Collection[str]) -> None:
    """An experiment of conf/experiment/ with these values; what names a run or its records is left out."""
    kept = {key: text for key, text in overrides.items() if not key.startswith(("run.", "tracking", "resum"))}
    defaults: list[Any] = [kept.pop("experiment")] if "experiment" in kept else []
    defaults.append("_self_")
    defaults += [{f"override /{key}": kept.pop(key)} for key in sorted(kept.keys() & set(groups))]
    nested: dict[str, Any] = {}
    for key, text in kept.items():
        *above, last = key.split(".")
        inner = nested
        for word in above:
            inner = inner.setdefault(word, {})
        inner[last] = yaml.safe_load(text)
    text = yaml.safe_dump({"defaults": defaults}, sort_keys=False)
    text += yaml.safe_dump(nested, sort_keys=False) if nested else ""
    replace_text(path, f"# @package _global_\n# {remark}\n\n{text}")
