"""Shifted images: curves of every measure over severity, and the error for each corruption."""

from collections.abc import Sequence
from typing import Any

from dicedist.metrics.measures import CORRUPTION_ERROR, SHIFT, Measure
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Head, Section, Table, estimates
from dicedist.reporting.records import Group, Point, distinct
from dicedist.reporting.svg import Figure


def section(groups: Sequence[Group]) -> Section | None:
    kinds = distinct(kind for group in groups for e in group.evaluations for kind in e.get("shift", {}))
    if not kinds:
        return None
    shifted = {kind: [g for g in groups if any(kind in e.get("shift", {}) for e in g.evaluations)] for kind in kinds}
    measured = [
        (kind, [chart(of_kind, kind, measure) for measure in SHIFT], errors(of_kind, kind))
        for kind, of_kind in shifted.items()
    ]
    lacking = [group for group in groups if not any(e.get("shift") for e in group.evaluations)]
    return Section("report/shift", "Shift", {"groups": groups, "kinds": measured, "lacking": lacking})


def chart(groups: Sequence[Group], kind: str, measure: Measure) -> Figure | None:
    lines = [Line(g.label, g.style, points) for g in groups if len(points := curve(g, kind, measure)) > 1]
    last = max((line.points[-1].x for line in lines), default=0)
    return line_chart(f"{measure.title} under {kind}", lines, svg.span("severity", 0, last), measure.heading)


def curve(group: Group, kind: str, measure: Measure) -> list[Point]:
    known = [(severity, group.measure("shift", kind, "mean", str(severity), measure.name)) for severity in range(6)]
    return [Point(severity, value.times(measure.scale)) for severity, value in known if value is not None]


def errors(groups: Sequence[Group], kind: str) -> Table:
    """Return the table of mean errors over severities, for each corruption and over all of them."""
    found = [e["shift"][kind] for group in groups for e in group.evaluations if kind in e.get("shift", {})]
    names = distinct(name for shift in found for name in shift["sets"])
    values = {name: [group.pooled(mean_error(kind, name)) for group in groups] for name in names}
    values[CORRUPTION_ERROR.title] = [group.measure("shift", kind, CORRUPTION_ERROR.name) for group in groups]
    rows = [[name, *estimates(of_name, CORRUPTION_ERROR)] for name, of_name in values.items()]
    caption = f"Error in %, mean over severities, {found[0]['num_inputs']:,} images each"
    return Table(caption, [Head(kind), *(Head(group.label) for group in groups)], rows)


def mean_error(kind: str, name: str) -> Any:
    def read(evaluation: dict[str, Any]) -> float | None:
        levels = evaluation.get("shift", {}).get(kind, {"sets": {}})["sets"].get(name)
        return 1 - sum(own["accuracy"] for own in levels.values()) / len(levels) if levels else None

    return read
