"""The summary: one row per ensemble with seeds pooled, the best of each column in bold; and tiles for the best ones."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, FRESH_REDUNDANCY, OOD, OOD_SCORES, Measure
from dicedist.reporting import paper, svg
from dicedist.reporting.markup import Section, best_of, cell, estimate, remark, table, unevaluated
from dicedist.reporting.outside import common_sets, mean_auroc
from dicedist.reporting.records import Group, Pooled

NOT_FRESH = (
    "How much members share is compared by a fresh estimator, the same for every run: "
    "python -m dicedist.report --fresh runs/A runs/B."
)
FRESH = "redundancy, by a fresh estimator"
Reading = Callable[[Group], Pooled | None]


@dataclass(frozen=True)
class Column:
    over: str  # the common title of neighbouring columns
    title: str
    read: Reading
    measure: Measure
    praise: str = ""  # the text of the tile for the best ensemble, in the few columns that have one


def section(groups: Sequence[Group]) -> Section | None:
    evaluated = [group for group in groups if group.evaluations]
    if not evaluated:
        return None
    blocks = [list(block) for _, block in groupby(evaluated, key=lambda group: group.settings["data.name"])]
    shown = columns(evaluated)
    headings = [block[0].settings["data.name"] if len(blocks) > 1 else "" for block in blocks]
    rows = [(heading, block_rows(block, shown)) for heading, block in zip(headings, blocks, strict=True)]
    sets = common_sets(evaluated)
    caption = "Test set: mean ± sample deviation over n seeds"
    return Section(
        "summary",
        "Summary",
        "Runs that differ only in their seed are one row. Arrows say which way is better. Bold is better than every "
        "other row by more than both deviations over seeds and beyond the paired t interval; else nothing is bold. "
        "Before and after: temperature scaling, fitted on one half of the test set and measured on the other.",
        (tiles(blocks[0], shown) if len(blocks) == 1 else "")
        + table(caption, head(shown), rows, 2 + len(shown))
        + remark("" if any(column.over == FRESH for column in shown) else NOT_FRESH)
        + remark(f"OOD AUROC is after temperature, the mean over {', '.join(sets)}." if sets else "")
        + unevaluated(groups)
        + glossary(groups, shown),
    )


def columns(groups: Sequence[Group]) -> list[Column]:
    """The columns in which some ensemble has a value."""
    sets = common_sets(groups)
    accuracy, *others = [measure for measure in ENSEMBLE if measure.summary]
    errors = next(measure for measure in DIVERSITY if measure.summary)
    auroc = next(measure for measure in OOD if measure.summary)
    uncertainty = [
        Column(
            f"{measure.heading}{measure.arrow}",
            when,
            of(part, measure.name),
            measure,
            f"lowest {measure.title} after temperature" if (measure.name, when) == ("nll", "after") else "",
        )
        for measure in others
        for when, part in (("before", "ensemble"), ("after", "ensemble_tempered"))
    ]
    right = f"{accuracy.heading}{accuracy.arrow}"
    between = "between members"
    detected = f"OOD {auroc.heading}{auroc.arrow}"
    known = [
        Column(right, "ensemble", of("ensemble", accuracy.name), accuracy, f"most accurate, {accuracy.unit}"),
        Column(right, "members", of("members", accuracy.name), accuracy),
        Column(right, "student", of("student", accuracy.name), accuracy),
        Column(right, "the paper's", lambda group: paper.accuracy(group.runs[0].config), accuracy),
        *uncertainty,
        Column(between, errors.title + errors.arrow, of("diversity", errors.name), errors, f"highest {errors.title}"),
        *(
            Column(FRESH, measure.heading + measure.arrow, fresh_redundancy(kind), measure)
            for kind, measure in FRESH_REDUNDANCY.items()
        ),
        *(
            Column(detected, OOD_SCORES[score], mean_over(sets, score), auroc, praise)
            for score, praise in (("max_softmax_tempered", f"best OOD {auroc.heading}"), ("dice_x_w_tempered", ""))
        ),
    ]
    return [column for column in known if any(column.read(group) is not None for group in groups)]


def of(*path: str) -> Reading:
    return lambda group: group.measure(*path)


def mean_over(sets: Sequence[str], score: str) -> Reading:
    return lambda group: mean_auroc(group, sets, score)


def fresh_redundancy(kind: str) -> Reading:
    """The mean over pairs of members; what a run's own w says is not comparable between runs, and so not shown here."""

    def read(evaluation: dict[str, Any]) -> float | None:
        found = (evaluation.get("redundancy_fresh") or {}).get(kind)
        return statistics.fmean(found["nats_P"]) if found else None

    return lambda group: group.pooled(read)


def head(shown: Sequence[Column]) -> str:
    over = "".join(
        f'<th scope="colgroup" colspan="{len(list(columns))}">{escape(title)}</th>'
        for title, columns in groupby(shown, key=lambda column: column.over)
    )
    under = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in shown)
    first = '<th scope="col" rowspan="2">ensemble</th><th scope="col" rowspan="2">n</th>'
    return f"<tr>{first}{over}</tr><tr>{under}</tr>"


def block_rows(groups: Sequence[Group], shown: Sequence[Column]) -> list[str]:
    """Rows of the ensembles of one data set: only these are comparable."""
    values = [[column.read(group) for group in groups] for column in shown]
    best = [best_of(found, column.measure) for column, found in zip(shown, values, strict=True)]
    return [
        f'<tr><th scope="row">{svg.legend_key(group.style)}{escape(group.label)}</th><td>{len(group.evaluations)}</td>'
        + "".join(
            cell(values[place][row], column.measure.decimals, column.measure.scale, best[place][row])
            for place, column in enumerate(shown)
        )
        + "</tr>"
        for row, group in enumerate(groups)
    ]


def tiles(groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """Tiles for what matters most: who is first beyond the deviations, or the values of a single ensemble."""
    parts = []
    for column in shown:
        values = [column.read(group) for group in groups]
        first = [True] if len(groups) == 1 else best_of(values, column.measure)
        for group, value, is_first in zip(groups, values, first, strict=True):
            if column.praise and is_first and value is not None:
                figure = estimate(value, column.measure.decimals, column.measure.scale)
                said = column.praise if len(groups) > 1 else alone(column)
                parts.append(
                    f'<div class="tile"><span>{escape(said)}</span><strong>{figure}</strong>'
                    f"<em>{svg.legend_key(group.style)}{escape(group.label)}</em></div>"
                )
    return f'<div class="tiles">{"".join(parts)}</div>' if parts else ""


def alone(column: Column) -> str:
    """The text of a tile where there is nobody to be better than."""
    when = " temperature" if column.title in ("before", "after") else ""
    return f"{column.over.rstrip(' ↑↓')}, {column.title.rstrip(' ↑↓')}{when}"


def glossary(groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """What the methods and the columns are."""
    meanings = {group.settings["method.title"]: group.settings["method.meaning"] for group in groups}
    meanings |= {column.measure.title: column.measure.meaning for column in shown if column.measure.meaning}
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings.items())
    return f"<dl>{entries}</dl>"
