"""Abstention and calibration beyond the ECE: risk-coverage curves, and a table of the measures that go with them."""

import statistics
from collections.abc import Sequence
from html import escape

from dicedist.metrics.measures import FURTHER, UNCERTAINTY
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Section, best_of, cell, ensembles, figure, grid, table, without
from dicedist.reporting.records import Group, Point, pool

CURVES = ("ensemble", "mean member", "best member")


def section(groups: Sequence[Group]) -> Section | None:
    measured = [group for group in groups if curves(group)]
    if not measured:
        return None
    coverage = svg.unit("share of inputs answered")
    together = "Risk against coverage"
    lines = [Line(group.label, group.style, points(group, "ensemble")) for group in measured]
    first = [figure(together, line_chart(together, lines, coverage, "errors among the answered, %"))]
    own = [figure(f"{group.label}: ensemble and members", members_chart(group)) for group in measured]
    lacking = [group for group in groups if group.evaluations and not curves(group)]
    return Section(
        "abstention",
        "Abstention",
        "The ensemble answers the inputs that it is surest of and leaves the others to somebody else: errors among the "
        "answered against the share that is answered. A useful confidence makes the curve fall to the left; AURC is "
        "the area below it, AUGRC counts the errors among all inputs. Dashes are the mean member, dots the best: "
        "the most accurate on the same test images.",
        ensembles(measured)
        + grid([*first, *own], "two")
        + measures(measured)
        + without(lacking, "Evaluated by an earlier version, without these measures"),
    )


def curves(group: Group) -> list[dict[str, list[float]]]:
    return [evaluation["risk_coverage"] for evaluation in group.evaluations if "risk_coverage" in evaluation]


def points(group: Group, name: str) -> list[Point]:
    """Pooled over the runs that were tested on equally many inputs as the first, in %."""
    found = curves(group)
    alike = [curve for curve in found if curve["coverage"] == found[0]["coverage"]]
    pooled = [pool(100 * risk for risk in column) for column in zip(*(curve[name] for curve in alike), strict=True)]
    return [Point(x, y) for x, y in zip(found[0]["coverage"], pooled, strict=True) if y is not None]


def members_chart(group: Group) -> str:
    lines = [Line(name, group.style + svg.NUM_STYLES * place, points(group, name)) for place, name in enumerate(CURVES)]
    areas = ", ".join(
        f"{name} {statistics.fmean(point.y.mean for point in line.points):.1f}"
        for name, line in zip(CURVES, lines, strict=True)
    )
    title = f"Risk against coverage of {group.label}, mean in %: {areas}"
    return line_chart(title, lines, svg.unit("share of inputs answered"), "errors among the answered, %")


def measures(groups: Sequence[Group]) -> str:
    columns = [
        (measure, when, [group.measure(part, measure.name) for group in groups])
        for measure in FURTHER
        for when, part in (("", "ensemble"), (" + T", "ensemble_tempered"))
    ]
    columns += [(m, "", [group.measure("uncertainty", m.name) for group in groups]) for m in UNCERTAINTY]
    rows = [
        f'<tr><th scope="row">{escape(measure.heading + when + measure.arrow)}</th>'
        + "".join(
            cell(value, measure.decimals, measure.scale, is_best)
            for value, is_best in zip(values, best_of(values, measure), strict=True)
        )
        + "</tr>"
        for measure, when, values in columns
    ]
    titles = "".join(f'<th scope="col">{escape(group.label)}</th>' for group in groups)
    caption = "Calibration, abstention and the two sources of uncertainty; + T: by the split-half protocol on test"
    return table(caption, f'<tr><th scope="col">measure</th>{titles}</tr>', [("", rows)], 1 + len(groups))
