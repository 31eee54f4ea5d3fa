"""What methods are compared by, column by column, and how a difference and its interval are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, OOD, OOD_SCORES, Measure
from dicedist.metrics.statistics import Interval, paired_over_seeds
from dicedist.reporting import svg
from dicedist.reporting.markup import fixed
from dicedist.reporting.records import dig

BY_NAME = {measure.name: measure for measure in (*ENSEMBLE, *DIVERSITY, *OOD)}
BEFORE, AFTER = "before T", "after T"
PLAIN = ("", "")
Evaluation = Mapping[str, Any]  # an evaluation.json
Reading = Callable[[Evaluation], float | None]


@dataclass(frozen=True)
class Column:
    title: str
    measure: Measure
    read: Reading
    when: str = ""  # BEFORE | AFTER

    @property
    def heading(self) -> str:
        unit = f", {self.measure.unit}" if self.measure.unit else ""
        return f"{self.title} {self.when}".rstrip() + unit


def columns(evaluations: Sequence[Evaluation]) -> list[Column]:
    """The columns in which all have a value."""
    before_and_after = [
        Column(BY_NAME[name].title, BY_NAME[name], reading(part, name), when)
        for name in ("nll", "ece", "brier")
        for when, part in ((BEFORE, "ensemble"), (AFTER, "ensemble_tempered"))
    ]
    known = [
        Column("ensemble accuracy", BY_NAME["accuracy"], reading("ensemble", "accuracy")),
        Column("members' accuracy", BY_NAME["accuracy"], reading("members", "accuracy")),
        *before_and_after,
        Column(BY_NAME["ratio_error"].title, BY_NAME["ratio_error"], reading("diversity", "ratio_error")),
        *(
            Column(f"OOD AUROC, {OOD_SCORES[score]}", BY_NAME["auroc"], ood_reading(score))
            for score in ("max_softmax", "dice_x_w")
        ),
    ]
    return [column for column in known if all(column.read(evaluation) is not None for evaluation in evaluations)]


def reading(*path: str) -> Reading:
    return lambda evaluation: dig(evaluation, path)


def ood_reading(score: str) -> Reading:
    """The mean over OOD sets."""

    def read(evaluation: Evaluation) -> float | None:
        found = [scores[score]["auroc"] for scores in evaluation.get("ood", {}).values() if score in scores]
        return sum(found) / len(found) if found else None

    return read


def values(evaluations: Sequence[Evaluation], column: Column) -> list[float]:
    return [column.measure.scale * value for e in evaluations if (value := column.read(e)) is not None]


def against(
    own: Sequence[Evaluation], others: Sequence[Evaluation], shown: Sequence[Column]
) -> list[tuple[Column, Interval]]:
    return [(c, paired_over_seeds(values(own, c), values(others, c))) for c in shown]


def head(shown: Sequence[Column]) -> str:
    cells = (f'<th scope="col">{escape(column.heading + column.measure.arrow)}</th>' for column in shown)
    return f'<tr><th scope="col">method</th>{"".join(cells)}</tr>'


def row_of(name: str, style: int, cells: Sequence[str]) -> str:
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{svg.legend_key(style)}{escape(name)}</th>{shown}</tr>'


def difference_text(
    interval: Interval,
    measure: Measure,
    bold: tuple[str, str] = ("<b>", "</b>"),
    grey: tuple[str, str] = ('<span class="unclear">', "</span>"),
) -> str:
    """Bold where the interval leaves 0 out, grey where it does not or is not known."""
    text = signed(interval.mean, measure.decimals)
    if interval.lower is not None and interval.upper is not None:
        text += f" [{signed(interval.lower, measure.decimals)}, {signed(interval.upper, measure.decimals)}]"
    before, after = bold if interval.excludes_zero else grey
    return f"{before}{text}{after}"


def signed(value: float, decimals: int) -> str:
    return ("+" if value > 0 else "") + fixed(value, decimals)
