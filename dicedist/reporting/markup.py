"""The pieces of a page as values: sections and tables. Templates turn them into HTML, and escape all text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from dicedist.metrics import paired_over_seeds
from dicedist.metrics.measures import Measure
from dicedist.reporting.records import Group, Pooled
from dicedist.reporting.svg import Figure, render


@dataclass(frozen=True)
class Section:
    """A part of a page: its template says in which words and in which order the values are shown."""

    template: str
    title: str
    values: Mapping[str, Any]
    name: str = ""  # if it is not the template's

    @property
    def anchor(self) -> str:
        return self.name or self.template.rpartition("/")[2]

    @property
    def html(self) -> Markup:
        return render(f"{self.template}.html", **self.values)

    @property
    def figures(self) -> list[Figure]:
        return list(figures_in(self.values))


@dataclass(frozen=True)
class Head:
    """The head of a column; neighbors with the same `over` have it as their common title."""

    title: str
    over: str = ""
    kind: str = ""  # text | text wrap | text pre: how the cells below are set


@dataclass(frozen=True)
class Cell:
    text: str
    spread: str = ""  # small, behind the text
    kind: str = ""  # best | unclear | none
    style: int | None = None  # of the ensemble that the text names


Row = Sequence[Any]  # of cells and plain values; a string alone is the heading of the rows below it


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its head."""

    caption: str
    heads: Sequence[Head]
    rows: Sequence[Row]

    @property
    def levels(self) -> list[tuple[str, list[Head]]]:
        return [(over, list(heads)) for over, heads in groupby(self.heads, key=lambda head: head.over)]


def figures_in(value: object) -> Iterator[Figure]:
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from figures_in(inner)


def named(group: Group) -> Cell:
    return Cell(group.label, style=group.style)


def estimate(value: Pooled | None, decimals: int, scale: float = 1, best: bool = False) -> Cell:
    """Mean and deviation over seeds."""
    if value is None:
        return Cell("–", kind="none")
    spread = "" if value.deviation is None else f"± {fixed(scale * value.deviation, decimals)}"
    return Cell(fixed(scale * value.mean, decimals), spread, "best" if best else "")


def estimates(values: Sequence[Pooled | None], measure: Measure) -> list[Cell]:
    """Values that are compared with each other, the best in bold."""
    best = best_of(values, measure)
    return [estimate(v, measure.decimals, measure.scale, is_best) for v, is_best in zip(values, best, strict=True)]


def fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".replace("-", "−")


def best_of(values: Sequence[Pooled | None], measure: Measure) -> list[bool]:
    """Mark the one that is `apart` from every other and better, if there is one."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or measure.better is None:
        return [False] * len(values)
    best = (max if measure.better == "higher" else min)(known, key=lambda value: value.mean)
    clear = all(apart(best, other) for other in known if other is not best)
    return [clear and value is best for value in values]


def apart(one: Pooled, other: Pooled) -> bool:
    """Beyond both deviations, and where seeds can be paired also beyond the t interval of their differences.

    A single run has no deviation, so that nothing can be said of it.
    """
    if one.deviation is None or other.deviation is None:
        return False
    if len(one.values) == len(other.values) > 1 and not paired_over_seeds(one.values, other.values).excludes_zero:
        return False
    return abs(one.mean - other.mean) > one.deviation + other.deviation
