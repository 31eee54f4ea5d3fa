"""The page: its sections in order below a table of contents, in one file that includes its style and has no script."""

import re
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

from dicedist import __version__
from dicedist.console.lines import plural
from dicedist.reporting import (
    adversary,
    calibration,
    classes,
    comparison,
    dynamics,
    gallery,
    outside,
    selective,
    shift,
    summary,
    tradeoff,
)
from dicedist.reporting.labels import shared
from dicedist.reporting.markup import Section, cell, table
from dicedist.reporting.records import Group, Recorded, pool, read_groups
from dicedist.runs.files import replace_text
from dicedist.runs.run import Run

STYLE = Path(__file__).with_name("page.css")
FIGURE = re.compile(r'<figcaption>([^<]*)(?: <small>.*?</small>)?</figcaption><svg( [^>]*role="img".*?</svg>.*?</svg>)')
# Whatever a name in a record may contain, the page loads nothing and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(runs: Sequence[Run], output: Path) -> None:
    """Reports whatever the runs have recorded so far; runs that differ only in their seed are pooled."""
    text = page(read_groups(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, text)


def page(groups: Sequence[Group]) -> str:
    rooms = (
        summary,
        comparison,
        dynamics,
        tradeoff,
        calibration,
        selective,
        adversary,
        outside,
        shift,
        classes,
        gallery,
    )
    sections = [section for room in rooms if (section := room.section(groups)) is not None]
    sections.append(runs_section(groups))
    num_runs = sum(len(group.runs) for group in groups)
    counted = f"{plural(len(groups), 'ensemble')} from {plural(num_runs, 'run')}"
    one = groups[0]
    title = "Ensembles compared" if len(groups) > 1 else f"{one.label} on {one.settings['data.name']}"
    about = " · ".join([counted, *shared([group.settings for group in groups])])
    return document(title, about, sections)


def document(title: str, about: str, sections: Sequence[Section]) -> str:
    """Any page: its sections below a table of contents."""
    contents = "".join(f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}: {escape(about)}</title><style>{STYLE.read_text()}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>"
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav><main>{"".join(map(shown, sections))}</main>'
        f"<footer>Written by dicedist {escape(__version__)} from the runs' own records.</footer></body></html>\n"
    )


def write_comparison(output: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The paper's figures beside ours: a section for each of its tables, whose name is the first column."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head[1:])
    sections = []
    for name in dict.fromkeys(row[0] for row in rows):
        lines = ["".join(f"<td>{escape(value)}</td>" for value in row[1:]) for row in rows if row[0] == name]
        body = table(
            f"Table {name}", f"<tr>{titles}</tr>", [("", [f"<tr>{line}</tr>" for line in lines])], len(head) - 1
        )
        sections.append(Section(name, name, "Measures in the paper's unit, mean and deviation over seeds.", body))
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, document("The paper's tables", "its figures beside ours", sections))


def pictures(text: str) -> dict[str, str]:
    """The figures of a page as stand-alone files: name -> SVG."""
    opening = '<svg xmlns="http://www.w3.org/2000/svg" style="background: var(--surface)"'
    style = f"><style>{STYLE.read_text()}</style>"
    return {
        re.sub(r"\W+", "-", unescape(title)).strip("-").lower(): opening + picture.replace(">", style, 1)
        for title, picture in FIGURE.findall(text)
    }


def shown(section: Section) -> str:
    return (
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2><p class="lead">{escape(section.lead)}</p>'
        f"{section.body}</section>"
    )


def runs_section(groups: Sequence[Group]) -> Section:
    head = "".join(
        f'<th scope="col"{kind}>{title}</th>'
        for title, kind in (
            ("run", ""),
            ("ensemble", ' class="text"'),
            ("seed", ""),
            ("epochs", ""),
            ("steps", ""),
            ("test accuracy, %", ""),
            ("what is missing", ' class="text"'),
        )  # fmt: skip
    )
    rows = [run_row(run, group) for group in groups for run in group.runs]
    return Section(
        "runs",
        "Runs",
        "The folders that this page was made from, and what they do not tell.",
        table("One row per run", f"<tr>{head}</tr>", [("", rows)], 7),
    )


def run_row(run: Recorded, group: Group) -> str:
    last = run.records[-1] if run.records else {"epoch": 0.0, "step": 0}
    accuracy = pool([run.evaluation["ensemble"]["accuracy"]]) if run.evaluation else None
    missing = "; ".join(run.missing) or "nothing"
    return (
        f'<tr><th scope="row">{escape(run.run.name)}</th><td class="text">{escape(group.label)}</td>'
        f"<td>{run.config.seed}</td><td>{last['epoch']:g}</td><td>{last['step']}</td>{cell(accuracy, 2, 100)}"
        f'<td class="text wrap">{escape(missing)}</td></tr>'
    )
