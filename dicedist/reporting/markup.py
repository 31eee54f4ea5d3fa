"""Sections and tables of a page as values. Templates turn them into HTML, and escape all text."""

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
    """A section of a page: a template and its values."""

    template: str
    title: str
    values: Mapping[str, Any]
    name: str = ""  # if it differs from the template's

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
    """The head of a column. Neighbors with equal `over` share it as a common title."""

    title: str
    over: str = ""
    kind: str = ""  # text | text wrap | text pre: how the cells below are set


@dataclass(frozen=True)
class Cell:
    text: str
    spread: str = ""  # small, behind the text
    kind: str = ""  # best | unclear | none
    style: int | None = None  # of the ensemble that the text names


Row = Sequence[Any]  # cells and plain values; a lone string is the heading of the rows below


@dataclass(frozen=True)
class Table:
    """A table. The first cell of a row is its head."""

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
    """Format mean and deviation over seeds."""
    if value is None:
        return Cell("–", kind="none")
    spread = "" if value.deviation is None else f"± {fixed(scale * value.deviation, decimals)}"
    return Cell(fixed(scale * value.mean, decimals), spread, "best" if best else "")


def estimates(values: Sequence[Pooled | None], measure: Measure) -> list[Cell]:
    """Format values that are compared with each other, the best in bold."""
    best = best_of(values, measure)
    return [estimate(v, measure.decimals, measure.scale, is_best) for v, is_best in zip(values, best, strict=True)]


def fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".replace("-", "−")


def best_of(values: Sequence[Pooled | None], measure: Measure) -> list[bool]:
    """Mark the value that is better than and `apart` from all others, if there is one."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or measure.better is None:
        return [False] * len(values)
    best = (max if measure.better == "higher" else min)(known, key=lambda value: value.mean)
    clear = all(apart(best, other) for other in known if other is not best)
    return [clear and value is best for value in values]


def apart(one: Pooled, other: Pooled) -> bool:
    """Return whether two values differ by more than both deviations and, if seeds are paired, beyond the t interval.

    A single run has no deviation, so it is apart from nothing.
    """
    if one.deviation is None or other.deviation is None:
        return False
    if len(one.values) == len(other.values) > 1 and not paired_over_seeds(one.values, other.values).excludes_zero:
        return False
    return abs(one.mean - other.mean) > one.deviation + other.deviation
