"""Line charts with one pooled line per ensemble, labeled at its end if there is room."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.reporting import svg
from dicedist.reporting.records import Point
from dicedist.reporting.svg import Axis, Figure, Panel, number

MOST_MARKERS = 16
WIDEST_LABEL = 124.0
LABEL_GAP = 13.0
Reference = tuple[float, str]  # height and name of a horizontal reference line


@dataclass(frozen=True)
class Line:
    label: str
    style: int
    points: list[Point]


def line_chart(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y_label: str,
    reference: Reference | None = None,
    diagonal: bool = False,
    note: str = "",
) -> Figure | None:
    """Draw the lines that have points. diagonal: use the same range for both axes."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    widest = max(svg.width_of(line.label, bold=True) for line in lines)
    named = len(lines) > 1 and widest <= WIDEST_LABEL and not diagonal
    covered = [*heights(lines), *([reference[0]] if reference else [])]
    y = Axis(y_label, x.low, x.high, x.ticks) if diagonal else svg.axis(y_label, covered)
    panel = Panel(x, y, right=22 + widest if named else 14)
    if diagonal:
        panel.reference((x.low, x.low), (x.high, x.high))
    if reference:
        height, name = reference
        panel.reference((x.low, height), (x.high, height))
        panel.write(panel.right - 4, panel.y(height) - 5, name, "note", "end")  # lines mostly begin at it
    for line in lines:
        draw_line(panel, line, x.label)
    if named:
        write_ends(panel, lines)
    return panel.figure(title, f"{title}, {y_label}, against {x.label}. " + in_words(lines, x.label), note)


def draw_line(panel: Panel, line: Line, unit: str) -> None:
    points = line.points
    if any(point.y.deviation for point in points):
        upper = [(point.x, band(point)[1]) for point in points]
        panel.area(upper + [(point.x, band(point)[0]) for point in reversed(points)], line.style)
    panel.line([(point.x, point.y.mean) for point in points], line.style)
    for point in points if len(points) <= MOST_MARKERS else points[-1:]:
        tip = f"{line.label}, {unit} {number(point.x, 4)}: {number(point.y.mean, 4)}"
        more = f" ± {number(point.y.deviation, 2)} over {point.y.n} runs" if point.y.deviation is not None else ""
        panel.mark(point.x, point.y.mean, line.style, tip + more)


def write_ends(panel: Panel, lines: Sequence[Line]) -> None:
    ends = [panel.y(line.points[-1].y.mean) for line in lines]
    for line, height in zip(lines, apart(ends, LABEL_GAP, panel.top, panel.floor), strict=True):
        panel.write(panel.right + 9, height + 4, line.label, f"label {svg.style(line.style)}")


def apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels to keep them `gap` apart, in their order and, if they fit, between low and high."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    moved = list(heights)
    for place in reversed(order):
        moved[place] = min(moved[place], high)
        high = moved[place] - gap
    for place in order:
        moved[place] = max(moved[place], low)
        low = moved[place] + gap
    return moved


def heights(lines: Sequence[Line]) -> list[float]:
    """Return the values that the axis must cover: the ends of all curves, without a few extremes."""
    found = sorted(height for line in lines for point in line.points for height in band(point))
    cut = len(found) // 100
    return [*found[cut : len(found) - cut], *(height for line in lines for height in band(line.points[-1]))]


def band(point: Point) -> tuple[float, float]:
    deviation = point.y.deviation or 0.0
    return point.y.mean - deviation, point.y.mean + deviation


def in_words(lines: Sequence[Line], unit: str) -> str:
    sentences = []
    for line in lines:
        first, last = line.points[0], line.points[-1]
        course = f"{number(last.y.mean)} at {unit} {number(last.x)}"
        if len(line.points) > 1:
            course = f"from {number(first.y.mean)} at {unit} {number(first.x)} to {course}"
        sentences.append(f"{line.label}: {course}.")
    return " ".join(sentences)
