"""Shifted images: curves of every measure over the severity, and the error on each kind of corruption."""

from collections.abc import Sequence
from html import escape
from typing import Any

from dicedist.metrics.measures import CORRUPTION_ERROR, SHIFT, Measure
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Section, best_of, cell, ensembles, figure, folded, grid, table, without
from dicedist.reporting.records import Group, Point, Pooled, dig, pool


def section(groups: Sequence[Group]) -> Section | None:
    shifted = [group for group in groups if kinds([group])]
    if not shifted:
        return None
    parts = [one_kind([group for group in shifted if kind in kinds([group])], kind) for kind in kinds(shifted)]
    lacking = [group for group in groups if group.evaluations and group not in shifted]
    return Section(
        "shift",
        "Shift",
        "The test images as the world may spoil them, more at each severity; 0 are the images as they are. Means over "
        "the kinds of corruption. A good ensemble grows unsure as it grows wrong, so that its ECE stays low. Strengths "
        "are those of CIFAR-C; only shift=cifar_c uses its own files.",
        ensembles(shifted) + "".join(parts) + without(lacking, "Not measured under shift"),
    )


def kinds(groups: Sequence[Group]) -> list[str]:
    return list(
        dict.fromkeys(kind for g in groups for evaluation in g.evaluations for kind in evaluation.get("shift", {}))
    )


def one_kind(groups: Sequence[Group], kind: str) -> str:
    figures = []
    for measure in SHIFT:
        lines = [Line(g.label, g.style, points) for g in groups if len(points := curve(g, kind, measure)) > 1]
        if lines:
            axis = svg.span("severity", 0, max(line.points[-1].x for line in lines))
            figures.append(
                figure(f"{measure.title} under {kind}", line_chart(measure.title, lines, axis, measure.heading))
            )
    return folded(kind, grid(figures, "two") + errors(groups, kind), is_open=True)


def of(group: Group, kind: str, *path: str) -> Pooled | None:
    return pool(dig(evaluation.get("shift", {}).get(kind), path) for evaluation in group.evaluations)


def curve(group: Group, kind: str, measure: Measure) -> list[Point]:
    known = [(severity, of(group, kind, "mean", str(severity), measure.name)) for severity in range(6)]
    return [Point(severity, value.times(measure.scale)) for severity, value in known if value is not None]


def errors(groups: Sequence[Group], kind: str) -> str:
    """The error on each corruption, the mean over its severities; and over all."""
    names = list(dict.fromkeys(name for evaluation in found(groups, kind) for name in evaluation["sets"]))
    rows = [row(name, [pool(map(mean_error(name), found([g], kind))) for g in groups]) for name in names]
    rows.append(row(CORRUPTION_ERROR.title, [of(group, kind, CORRUPTION_ERROR.name) for group in groups]))
    num_inputs = found(groups, kind)[0]["num_inputs"]
    titles = "".join(f'<th scope="col">{escape(group.label)}</th>' for group in groups)
    caption = f"Error in %, mean over severities, {num_inputs:,} images each"
    return table(caption, f'<tr><th scope="col">{escape(kind)}</th>{titles}</tr>', [("", rows)], 1 + len(groups))


def found(groups: Sequence[Group], kind: str) -> list[dict[str, Any]]:
    return [e["shift"][kind] for group in groups for e in group.evaluations if kind in e.get("shift", {})]


def mean_error(name: str) -> Any:
    def read(shift: dict[str, Any]) -> float | None:
        levels = shift["sets"].get(name)
        return 1 - sum(own["accuracy"] for own in levels.values()) / len(levels) if levels else None

    return read


def row(title: str, values: Sequence[Pooled | None]) -> str:
    cells = "".join(
        cell(value, CORRUPTION_ERROR.decimals, CORRUPTION_ERROR.scale, best)
        for value, best in zip(values, best_of(values, CORRUPTION_ERROR), strict=True)
    )
    return f'<tr><th scope="row">{escape(title)}</th>{cells}</tr>'
