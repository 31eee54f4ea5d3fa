"""The report page: sections below a table of contents, in one HTML file with its style and without scripts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dicedist import __version__
from dicedist.console.lines import plural
from dicedist.reporting import (
    adversary,
    calibration,
    classes,
    comparison,
    decisions,
    dynamics,
    gallery,
    outside,
    selective,
    shift,
    summary,
    tradeoff,
)
from dicedist.reporting.labels import shared
from dicedist.reporting.markup import Head, Section, Table
from dicedist.reporting.records import Group, distinct, read_groups
from dicedist.reporting.svg import Figure, render
from dicedist.runs.files import replace_text
from dicedist.runs.run import Run


def write_report(runs: Sequence[Run], output: Path) -> None:
    """Write a report of all records so far. Runs that differ only in their seed are pooled."""
    text = page(read_groups(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, as_text(text))


def as_text(text: str) -> str:
    """Replace surrogates, which stand for bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def write_own_report(run: Run) -> None:
    """Write the report of a run into its folder, also if another process does so at the same time."""
    with run.writing():
        write_report([run], run.report_file)


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return the figures of the report by name; a name that two sections use has the section in front."""
    found = [(section.anchor, figure) for section in sections(read_groups(runs)) for figure in section.figures]
    times = Counter(figure.name for _, figure in found)
    return {figure.name if times[figure.name] == 1 else f"{section}-{figure.name}": figure for section, figure in found}


def page(groups: Sequence[Group]) -> str:
    num_runs = sum(len(group.runs) for group in groups)
    counted = f"{plural(len(groups), 'ensemble')} from {plural(num_runs, 'run')}"
    one = groups[0]
    title = "Ensembles compared" if len(groups) > 1 else f"{one.label} on {one.settings['data.name']}"
    about = " · ".join([counted, *shared([group.settings for group in groups])])
    return document(title, about, sections(groups))


def sections(groups: Sequence[Group]) -> list[Section]:
    evaluated = [group for group in groups if group.evaluations]
    others = [group for group in groups if not group.evaluations]
    found = [dynamics.section(groups), adversary.section(groups)]
    if evaluated:
        found = [
            decisions.section(evaluated),
            summary.section(evaluated, others),
            comparison.section(evaluated),
            dynamics.section(groups),
            tradeoff.section(evaluated),
            calibration.section(evaluated),
            selective.section(evaluated),
            adversary.section(groups),
            outside.section(evaluated),
            shift.section(evaluated),
            classes.section(evaluated),
            gallery.section(evaluated),
        ]
    return [*(section for section in found if section is not None), Section("report/runs", "Runs", {"groups": groups})]


def document(title: str, about: str, sections: Sequence[Section]) -> str:
    """Return a page: its sections below a table of contents."""
    return str(render("page.html", title=title, about=about, sections=sections, version=__version__))


def write_comparison(output: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the paper's figures next to ours, with a section for each table, which the first column names."""
    lead = "Measures in the paper's unit, mean and deviation over seeds."
    heads, found = [Head(title) for title in head[1:]], []
    for name in distinct(row[0] for row in rows):
        table = Table(f"Table {name}", heads, [row[1:] for row in rows if row[0] == name])
        found.append(Section("table", name, {"lead": lead, "table": table}, name))
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, document("The paper's tables", "its figures next to ours", found))
