"""Abstention and calibration beyond the ECE: risk-coverage curves, and a table of the measures."""

import statistics
from collections.abc import Sequence

from dicedist.metrics.measures import FURTHER, UNCERTAINTY
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Head, Section, Table, estimates
from dicedist.reporting.records import Group, Point, pool
from dicedist.reporting.svg import Figure

CURVES = ("ensemble", "mean member", "best member")
COVERAGE, RISK = svg.span("share of inputs answered", 0, 1), "errors among the answered, %"


def section(groups: Sequence[Group]) -> Section | None:
    measured = [group for group in groups if curves(group)]
    if not measured:
        return None
    lines = [Line(group.label, group.style, points(group, "ensemble")) for group in measured]
    figures = [line_chart("Risk against coverage", lines, COVERAGE, RISK), *map(members_chart, measured)]
    lacking = [group for group in groups if not curves(group)]
    values = {"groups": measured, "figures": figures, "table": measures(measured), "lacking": lacking}
    return Section("report/abstention", "Abstention", values)


def curves(group: Group) -> list[dict[str, list[float]]]:
    return [evaluation["risk_coverage"] for evaluation in group.evaluations if "risk_coverage" in evaluation]


def points(group: Group, name: str) -> list[Point]:
    """Return the curve in %, pooled over the runs with as many test inputs as the first run."""
    found = curves(group)
    alike = [curve for curve in found if curve["coverage"] == found[0]["coverage"]]
    pooled = [pool(100 * risk for risk in column) for column in zip(*(curve[name] for curve in alike), strict=True)]
    return [Point(x, y) for x, y in zip(found[0]["coverage"], pooled, strict=True) if y is not None]


def members_chart(group: Group) -> Figure | None:
    lines = [Line(name, group.style + svg.NUM_STYLES * place, points(group, name)) for place, name in enumerate(CURVES)]
    areas = (f"{line.label} {statistics.fmean(point.y.mean for point in line.points):.1f}" for line in lines)
    title = f"{group.label}: ensemble and members"
    return line_chart(title, lines, COVERAGE, RISK, note=f"means in %: {', '.join(areas)}")


def measures(groups: Sequence[Group]) -> Table:
    parts = [(m, when, part) for m in FURTHER for when, part in (("", "ensemble"), (" + T", "ensemble_tempered"))]
    parts += [(measure, "", "uncertainty") for measure in UNCERTAINTY]
    rows = [
        [m.heading + when + m.arrow, *estimates([group.measure(part, m.name) for group in groups], m)]
        for m, when, part in parts
    ]
    caption = "Calibration, abstention and the two sources of uncertainty; + T: the paper's protocol"
    return Table(caption, [Head("measure"), *(Head(group.label) for group in groups)], rows)
