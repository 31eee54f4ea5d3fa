"""Reads the runs of a finished protocol, and writes its page and its table.

Legend: S seeds, N inputs, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dicedist.console.lines import say
from dicedist.metrics import bootstrap, ensemble_log_probabilities
from dicedist.metrics.measures import ENSEMBLE
from dicedist.metrics.statistics import Interval
from dicedist.reporting import calibration, outside, page, tradeoff
from dicedist.reporting.curves import Curve, Stop
from dicedist.reporting.evidence import Comparison, Contender, markdown, sections
from dicedist.reporting.records import pool, read_groups, styles_of
from dicedist.reporting.search import OUTCOMES
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job
from dicedist.studies.evidence import Evidence
from dicedist.studies.protocol import commit_of
from dicedist.studies.search import Search


def write_findings(evidence: Evidence, best: Mapping[str, Mapping[str, str]]) -> None:
    comparison = compared(evidence, best)
    groups = read_groups([job.run for method in best for job in seeds_of(evidence, method, best)])
    existing = [room.section(groups) for room in (calibration, outside, tradeoff)]
    pieces = [*sections(comparison), *(section for section in existing if section is not None)]
    output = evidence.directory / "evidence.html"
    replace_text(output, page.document(comparison.title, comparison.about, pieces))
    replace_text(evidence.directory / "table.md", markdown(comparison))
    say(f"\n{markdown(comparison)}\nfigures: {output}, tables: {evidence.directory / 'table.md'}")


def seeds_of(evidence: Evidence, method: str, best: Mapping[str, Mapping[str, str]]) -> list[Job]:
    protocol = evidence.protocol
    return [protocol.job(method, best[method], seed, evidence.directory) for seed in range(protocol.seeds)]


def compared(evidence: Evidence, best: Mapping[str, Mapping[str, str]]) -> Comparison:
    protocol = evidence.protocol
    jobs = {method: seeds_of(evidence, method, best) for method in protocol.methods}
    names = [of_method[0].config.method.name for of_method in jobs.values()]
    styles = dict(zip(jobs, styles_of(names), strict=True))
    predictions = {method: log_probabilities(of_method) for method, of_method in jobs.items()}
    contenders = [
        Contender(
            method,
            styles[method],
            [result_of(job) for job in jobs[method]],
            best[method],
            outcomes(evidence, method),
            {} if method == protocol.baseline else over_inputs(predictions[method], predictions[protocol.baseline]),
        )
        for method in protocol.methods
    ]
    return Comparison(
        protocol.title,
        protocol.question,
        commit_of(protocol.path),
        protocol.objective.title,
        next(one for one in contenders if one.name == protocol.baseline),
        contenders,
        curves(evidence, best, styles, contenders),
    )


def result_of(job: Job) -> dict[str, Any]:
    found = job.result
    if found is None:
        raise ValueError(f"{job.run} has no results: write the same command again, without --no-test")
    return found


def outcomes(evidence: Evidence, method: str) -> dict[str, int]:
    search = Search(evidence.protocol.plan(method, evidence.directory), 1)
    ended = search.outcomes()
    return {words: ended.count(state) for state, words in OUTCOMES.items() if state in ended}


def log_probabilities(jobs: Sequence[Job]) -> tuple[Tensor, Tensor]:
    """log_p_NSK of the ensembles of all seeds on the test set, and its labels."""
    files = [load_file(job.run.logits_file) for job in jobs]
    found = [
        ensemble_log_probabilities(file["logits"], job.config.evaluate.average)
        for file, job in zip(files, jobs, strict=True)
    ]
    return torch.stack(found, dim=1), files[0]["labels"].long()


def over_inputs(own: tuple[Tensor, Tensor], baseline: tuple[Tensor, Tensor]) -> dict[str, Interval]:
    """The bootstrap over inputs of the difference, for measures that are means over inputs."""
    named = {measure.name: measure for measure in ENSEMBLE if measure.per_input is not None}
    found = {}
    for name, measure in named.items():
        assert measure.per_input is not None
        interval = bootstrap(mean_over_seeds(measure.per_input), own[0], own[1], baseline[0])
        found[name] = interval.times(measure.scale)
    return found


def mean_over_seeds(per_input: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def measure(log_p_NSK: Tensor, labels_N: Tensor) -> Tensor:
        return torch.stack([per_input(log_p_NK, labels_N) for log_p_NK in log_p_NSK.unbind(1)]).mean(0)

    return measure


def curves(
    evidence: Evidence,
    best: Mapping[str, Mapping[str, str]],
    styles: Mapping[str, int],
    contenders: Sequence[Contender],
) -> list[Curve]:
    """For each method its varied runs in the order of the protocol; for those without, their one point."""
    protocol, found = evidence.protocol, []
    for one in contenders:
        if one.name not in protocol.curves:
            found.append(Curve(one.name, styles[one.name], "", stops_of([("", one.evaluations)])))
            continue
        key, values = protocol.curves[one.name]
        varied = []
        for value in values:
            seeds = range(protocol.curve_seeds)
            jobs = [protocol.job(one.name, best[one.name], s, evidence.directory, (key, value)) for s in seeds]
            varied.append((value, [result_of(job) for job in jobs]))
        found.append(Curve(one.name, styles[one.name], key, stops_of(varied)))
    return [curve for curve in found if curve.stops]


def stops_of(varied: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[Stop]:
    stops = []
    for value, evaluations in varied:
        accuracy = pool(100 * evaluation["members"]["accuracy"] for evaluation in evaluations)
        ratio = pool(evaluation["diversity"]["ratio_error"] for evaluation in evaluations)
        if accuracy is not None and ratio is not None:
            stops.append(Stop(value, evaluations, accuracy, ratio))
    return stops
