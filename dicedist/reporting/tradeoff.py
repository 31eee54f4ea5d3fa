"""The cost of diversity and the gain from size: ratio-error against member accuracy, accuracy against ensemble size."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch

from dicedist.metrics.measures import DIVERSITY
from dicedist.metrics.statistics import Course, at_equal
from dicedist.reporting import svg
from dicedist.reporting.comparison import difference
from dicedist.reporting.comparison import in_words as in_interval
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Cell, Head, Row, Section, Table
from dicedist.reporting.records import Group, Point, Pooled, pool
from dicedist.reporting.svg import Figure, Panel, number

FOLLOWS_SIZE = ("ensemble", "members", "redundancy.delta")
RATIO_ERROR = DIVERSITY[0]
STRUCTURES = {"net": "nets", "branch": "branches"}
LINE = 12.0  # height of a line of text
ANCHORS = {"start": 0.0, "end": 1.0, "middle": 0.5}  # the share of a text that is left of its anchor
SHIFTS = {"start": 9, "end": -9, "middle": 0}  # of a label's anchor to the right of its point
MOVES = [("start", 4), ("end", 4), *((anchor, down) for down in (-9, 17, -22, 30) for anchor in SHIFTS)]
Spot = tuple[Group, Pooled, Pooled]  # an ensemble, its individual accuracy in %, its ratio-error
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Curve:
    """A method with one key varied."""

    name: str
    style: int
    key: str  # empty if no key was varied
    stops: Mapping[str, Group]  # value of the key -> its runs

    @property
    def spots(self) -> list[Spot]:
        return located(self.stops.values())


def section(groups: Sequence[Group]) -> Section:
    averaged = [Line(group.label, group.style, sizes(group)) for group in groups]
    figures = [
        scatter(located(groups)),
        against_size("Accuracy against ensemble size", averaged, "members averaged"),
        against_size("Accuracy against the size that was trained", trained_apart(groups), "members trained"),
    ]
    single = [group for group in groups if not sizes(group)]
    return Section("report/tradeoff", "Diversity and size", {"groups": groups, "figures": figures, "single": single})


def against_size(title: str, lines: Sequence[Line], label: str) -> Figure | None:
    largest = max((line.points[-1].x for line in lines if line.points), default=1)
    return line_chart(title, lines, svg.counts(label, int(largest)), "test accuracy, %")


def sizes(group: Group) -> list[Point]:
    """Return the accuracy in % by number of members; empty for one member."""
    measured = [evaluation["accuracy_by_size"] for evaluation in group.evaluations]
    members = sorted({int(size) for by_size in measured for size in by_size})
    values = [
        (size, pool(100 * by_size[str(size)] for by_size in measured if str(size) in by_size)) for size in members
    ]
    return [Point(size, value) for size, value in values if value is not None] if len(values) > 1 else []


def trained_apart(groups: Sequence[Group]) -> list[Line]:
    """Return lines through ensembles of at least two sizes that differ only in size and what follows from it."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        same = {key: value for key, value in group.settings.items() if key not in FOLLOWS_SIZE}
        config = group.runs[0].config
        chosen = [config.structure, config.redundancy.delta]  # before `auto` is resolved by the size
        families.setdefault(json.dumps([same, chosen], sort_keys=True), []).append(group)
    lines = []
    for family in families.values():
        values = [(group.runs[0].plan.num_members, group.measure("ensemble", "accuracy")) for group in family]
        points = [Point(size, accuracy.times(100)) for size, accuracy in sorted(values, key=itemgetter(0)) if accuracy]
        if len({point.x for point in points}) > 1:
            title, structure = family[0].settings["method.title"], family[0].runs[0].config.structure
            lines.append(Line(f"{title}, {STRUCTURES[structure]}", family[0].style, points))
    return lines


def located(groups: Iterable[Group]) -> list[Spot]:
    """Return the ensembles that have a ratio-error."""
    found = [
        (group, group.measure("members", "accuracy"), group.measure("diversity", "ratio_error")) for group in groups
    ]
    return [(group, x.times(100), y) for group, x, y in found if x is not None and y is not None]


def scatter(spots: Sequence[Spot]) -> Figure | None:
    """Draw ratio-error against accuracy. Small marks are runs, larger ones means; a line joins values of delta."""
    dots = [
        (group, 100 * evaluation["members"]["accuracy"], ratio)
        for group, _, _ in spots
        for evaluation in group.evaluations
        if (ratio := evaluation["diversity"]["ratio_error"]) is not None
    ]
    if not dots:
        return None
    panel = plane([x for _, x, _ in dots], [y for _, _, y in dots])
    for group, x, y in dots:
        panel.mark(x, y, group.style, f"{group.label}: {number(x, 4)} %, ratio-error {number(y)}", 2, hollow=True)
    mark_means(panel, spots, [pair for pair in pairwise(spots) if differ_in_delta(pair[0][0], pair[1][0])])
    write_names(panel, spots)
    return panel.figure("Diversity against individual accuracy", in_words(spots))


def plane(accuracies: Sequence[float], ratios: Sequence[float]) -> Panel:
    x = svg.axis("mean accuracy of the members, test, %", accuracies)
    return Panel(x, svg.axis("ratio-error: single per shared error, test", ratios), height=270)


def mark_means(panel: Panel, spots: Sequence[Spot], joined: Iterable[Sequence[Spot]]) -> None:
    for line in joined:
        panel.line([(x.mean, y.mean) for _, x, y in line], line[0][0].style, "thin")
    for group, accuracy, ratio in spots:
        tip = f"{group.label}, mean of {ratio.n}: {number(accuracy.mean, 4)} %, ratio-error {number(ratio.mean)}"
        panel.mark(accuracy.mean, ratio.mean, group.style, tip, 5)


def in_words(spots: Sequence[Spot]) -> str:
    words = ", ".join(f"{g.label} at {number(x.mean)} % and {number(y.mean)}" for g, x, y in spots)
    return f"Ratio-error on the test set against the mean accuracy of the members: {words}."


def differ_in_delta(first: Group, second: Group) -> bool:
    keys = first.settings.keys() | second.settings.keys()
    return {key for key in keys if first.settings.get(key) != second.settings.get(key)} == {"redundancy.delta"}


def write_names(panel: Panel, spots: Sequence[Spot]) -> None:
    """Write each label next to its point, inside the plot, with the least overlap."""
    taken: list[Box] = [(mark.x - 5, mark.y - 5, mark.x + 5, mark.y + 5) for mark in panel.marks]
    plot = (panel.left, panel.top, panel.right, panel.floor)
    for group, accuracy, ratio in spots:
        width = svg.width_of(group.label, bold=True)
        places = []
        for anchor, down in MOVES:
            x, y = panel.x(accuracy.mean) + SHIFTS[anchor], panel.y(ratio.mean) + down
            left = x - width * ANCHORS[anchor]
            box = (left, y - LINE + 2, left + width, y + 2)
            cost = 3 * (width * LINE - shared(box, plot)) + sum(shared(box, other) for other in taken)
            places.append((cost, x, y, anchor, box))
        _, x, y, anchor, box = min(places, key=itemgetter(0))
        taken.append(box)
        panel.write(x, y, group.label, f"label halo {svg.style(group.style)}", anchor)


def shared(one: Box, other: Box) -> float:
    """Return the area of the intersection."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def trade(curves: Sequence[Curve]) -> Figure:
    """Draw the curves, with the deviations of accuracy over seeds as bars."""
    spots = [spot for curve in curves for spot in curve.spots]
    bars = [(x.mean - (x.deviation or 0.0), x.mean + (x.deviation or 0.0)) for _, x, _ in spots]
    panel = plane([end for bar in bars for end in bar], [ratio.mean for _, _, ratio in spots])
    for (group, _, ratio), bar in zip(spots, bars, strict=True):
        panel.line([(end, ratio.mean) for end in bar], group.style, "thin")
    mark_means(panel, spots, [curve.spots for curve in curves])
    return panel.figure("Diversity against individual accuracy, one key varied", in_words(spots))


def equal_accuracy(curves: Sequence[Curve], accuracy: float) -> Table | None:
    """Return a table of ratio-errors at equal accuracy of members, with intervals and differences from the first curve.

    accuracy: in %, fixed before the test set was read.
    """
    courses = [(curve, course) for curve in curves if (course := course_of(curve)) is not None]
    if len(courses) < 2:
        return None
    (reference, first), *_ = courses
    rows: list[Row] = []
    for curve, course in courses:
        paired = course is not first and len(course.x_SP) == len(first.x_SP)
        apart = at_equal(course, accuracy, first) if paired else None
        found = at_equal(course, accuracy)
        shown = "not reached" if found is None else in_interval(found, RATIO_ERROR, signed=False)
        rows.append([Cell(curve.name, style=curve.style), shown, difference(apart, RATIO_ERROR)])
    heads = [Head("method"), Head(f"ratio-error at {accuracy:.2f} %"), Head(f"difference from {reference.name}")]
    return Table("Ratio-error at equal accuracy of members: bootstrap over seeds, 95 %", heads, rows)


def course_of(curve: Curve) -> Course | None:
    """Return the runs of a curve by seed and value of its key; None if no key was varied."""
    points = [(x.values, y.values) for _, x, y in curve.spots]
    if len(points) < 2 or len({len(values) for point in points for values in point}) > 1:
        return None
    x_SP, y_SP = (torch.tensor([point[axis] for point in points], dtype=torch.float64).T for axis in (0, 1))
    return Course(x_SP, y_SP)
