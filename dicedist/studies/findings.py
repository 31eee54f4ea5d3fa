"""Read the runs of a finished protocol, and write its page and its table."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from dicedist.config import names
from dicedist.console.lines import say
from dicedist.reporting import calibration, outside, tradeoff
from dicedist.reporting.evidence import Comparison, markdown, sections
from dicedist.reporting.page import document
from dicedist.reporting.records import Group, read_run, styles_of
from dicedist.reporting.search import OUTCOMES
from dicedist.reporting.tradeoff import Curve
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job
from dicedist.studies.evidence import Evidence
from dicedist.studies.protocol import commit_of
from dicedist.studies.search import Search


def write_findings(evidence: Evidence, best: Mapping[str, Mapping[str, str]]) -> None:
    comparison = compared(evidence, best)
    general = [room.section(comparison.groups) for room in (calibration, outside, tradeoff)]
    page, tables = evidence.directory / "evidence.html", evidence.directory / "table.md"
    replace_text(page, document(comparison.title, comparison.about, [*sections(comparison), *general]))
    replace_text(tables, markdown(comparison))
    say(f"\n{markdown(comparison)}\nfigures: {page}, tables: {tables}")


def compared(evidence: Evidence, best: Mapping[str, Mapping[str, str]]) -> Comparison:
    protocol, folder = evidence.protocol, evidence.directory
    groups, curves = {}, []
    jobs = {m: [protocol.job(m, best[m], seed, folder) for seed in range(protocol.seeds)] for m in protocol.methods}
    styles = styles_of([of_method[0].config.method.name for of_method in jobs.values()])
    for (method, of_method), style in zip(jobs.items(), styles, strict=True):
        groups[method] = group_of(method, style, of_method)
        key, values = protocol.curves.get(method, ("", ()))
        stops = {
            value: group_of(
                f"{method}, {key.rpartition('.')[2]} {value}",
                style,
                [protocol.job(method, best[method], s, folder, (key, value)) for s in range(protocol.curve_seeds)],
            )
            for value in values
        }
        curves.append(Curve(method, style, key, stops or {"": groups[method]}))
    return Comparison(
        protocol.title,
        protocol.question,
        commit_of(protocol.path),
        protocol.objective.title,
        groups[protocol.baseline],
        list(groups.values()),
        best,
        {method: outcomes(evidence, method) for method in groups},
        [curve for curve in curves if curve.spots],
        100 * (protocol.member_accuracy or validated(groups[protocol.baseline])),
    )


def validated(group: Group) -> float:
    """Return the mean accuracy of members on validation inputs after training."""
    found = [run.run.last_validation(names.record(names.MEMBERS, names.ACCURACY)) for run in group.runs]
    return fmean(value for value in found if value is not None)


def group_of(label: str, style: int, jobs: Sequence[Job]) -> Group:
    for job in jobs:
        if job.result is None:
            raise ValueError(f"{job.run} has no results: write the same command again, without --no-test")
    return Group(label, style, [read_run(job.run) for job in jobs])


def outcomes(evidence: Evidence, method: str) -> dict[str, int]:
    if not evidence.protocol.trials:
        return {}
    ended = Search(evidence.protocol.plan(method, evidence.directory), 1).outcomes()
    return {words: ended.count(state) for state, words in OUTCOMES.items() if state in ended}
