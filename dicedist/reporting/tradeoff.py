"""The cost of diversity and the gain from size: ratio-error against member accuracy, accuracy against ensemble size."""

import json
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from dicedist.reporting import svg
from dicedist.reporting.lines import Line, line_chart
from dicedist.reporting.markup import Section, ensembles, figure, grid, unevaluated, without
from dicedist.reporting.placing import around, clear_place
from dicedist.reporting.records import Group, Point, Pooled, pool
from dicedist.reporting.svg import Panel, number

FOLLOWS_SIZE = ("ensemble", "members", "redundancy.delta")
STRUCTURES = {"net": "nets", "branch": "branches"}
Spot = tuple[Group, Pooled, Pooled]  # an ensemble, its individual accuracy, its ratio-error


def section(groups: Sequence[Group]) -> Section | None:
    if not any(group.evaluations for group in groups):
        return None
    single = [group for group in groups if group.evaluations and not sizes(group)]
    figures = []
    if spots := located(groups):
        figures.append(figure("Diversity against individual accuracy", scatter(spots)))
    if lines := [Line(group.label, group.style, curve) for group in groups if (curve := sizes(group))]:
        members = svg.counts("members averaged", int(max(line.points[-1].x for line in lines)))
        title = "Accuracy against ensemble size"
        figures.append(figure(title, line_chart(title, lines, members, "test accuracy, %")))
    if lines := trained_apart(groups):
        members = svg.counts("members trained", int(max(line.points[-1].x for line in lines)))
        title = "Accuracy against the size that was trained"
        figures.append(figure(title, line_chart(title, lines, members, "test accuracy, %")))
    return Section(
        "tradeoff",
        "Diversity and size",
        "First: up is more diverse, to the right are better members. Small marks are single runs; a thin line joins "
        "values of δ of one method. Second: the mean accuracy of all ensembles that can be made of so many of a run's "
        "members. Third, where ensembles of several sizes were trained: one line through their accuracies.",
        ensembles(groups)
        + grid(figures, "two")
        + unevaluated(groups)
        + without(single, "One member alone has no diversity"),
    )


def sizes(group: Group) -> list[Point]:
    """Accuracy in % by the number of members; empty if there is only one."""
    measured = [evaluation["accuracy_by_size"] for evaluation in group.evaluations]
    members = sorted({int(size) for by_size in measured for size in by_size})
    values = [
        (size, pool(100 * by_size[str(size)] for by_size in measured if str(size) in by_size)) for size in members
    ]
    return [Point(size, value) for size, value in values if value is not None] if len(values) > 1 else []


def trained_apart(groups: Sequence[Group]) -> list[Line]:
    """Lines through ensembles that differ only in their size, and in what follows from it; of two sizes at least."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        fixed = {key: value for key, value in group.settings.items() if key not in FOLLOWS_SIZE}
        config = group.runs[0].config
        chosen = [config.structure, config.redundancy.delta]  # auto: what the size makes of it
        families.setdefault(json.dumps([fixed, chosen], sort_keys=True), []).append(group)
    lines = []
    for family in families.values():
        values = [(group.runs[0].plan.num_members, group.measure("ensemble", "accuracy")) for group in family]
        points = [Point(size, accuracy.times(100)) for size, accuracy in sorted(values, key=itemgetter(0)) if accuracy]
        if len({point.x for point in points}) > 1:
            title, structure = family[0].settings["method.title"], family[0].runs[0].config.structure
            lines.append(Line(f"{title}, {STRUCTURES[structure]}", family[0].style, points))
    return lines


def located(groups: Sequence[Group]) -> list[Spot]:
    """The ensembles that have a ratio-error; accuracies in %."""
    found = [
        (group, group.measure("members", "accuracy"), group.measure("diversity", "ratio_error")) for group in groups
    ]
    return [(group, x.times(100), y) for group, x, y in found if x is not None and y is not None]


def scatter(spots: Sequence[Spot]) -> str:
    dots = [(group, x, y) for group, _, _ in spots for x, y in single_runs(group)]
    panel = Panel(
        svg.axis("mean accuracy of the members, test, %", (x for _, x, _ in dots)),
        svg.axis("ratio-error: single per shared error, test", (y for _, _, y in dots)),
        height=270,
    )
    for before, after in pairwise(spots):
        if differ_in_delta(before[0], after[0]):
            panel.line([(spot[1].mean, spot[2].mean) for spot in (before, after)], before[0].style, "thin")
    write_names(panel, spots, [(x, y) for _, x, y in dots])  # drawn below the marks, so that no mark is hidden
    for group, x, y in dots:
        panel.mark(x, y, group.style, f"{group.label}: {number(x, 4)} %, ratio-error {number(y)}", 2, hollow=True)
    for group, accuracy, ratio in spots:
        tip = f"{group.label}, mean of {ratio.n}: {number(accuracy.mean, 4)} %, ratio-error {number(ratio.mean)}"
        panel.mark(accuracy.mean, ratio.mean, group.style, tip, 5)
    words = ", ".join(f"{g.label} at {number(x.mean)} % and {number(y.mean)}" for g, x, y in spots)
    return panel.draw(f"Ratio-error on the test set against the mean accuracy of the members: {words}.")


def single_runs(group: Group) -> list[tuple[float, float]]:
    pairs = [
        (evaluation["members"]["accuracy"], evaluation["diversity"]["ratio_error"]) for evaluation in group.evaluations
    ]
    return [(100 * x, y) for x, y in pairs if y is not None]


def differ_in_delta(first: Group, second: Group) -> bool:
    keys = first.settings.keys() | second.settings.keys()
    return {key for key in keys if first.settings.get(key) != second.settings.get(key)} == {"redundancy.delta"}


def write_names(panel: Panel, spots: Sequence[Spot], dots: Sequence[tuple[float, float]]) -> None:
    """Writes labels beside their points, where they hide least."""
    taken = [around(panel.x(x), panel.y(y), 3) for x, y in dots]
    taken += [around(panel.x(accuracy.mean), panel.y(ratio.mean), 6) for _, accuracy, ratio in spots]
    for group, accuracy, ratio in spots:
        place = clear_place(panel.x(accuracy.mean), panel.y(ratio.mean), group.label, panel, taken)
        taken.append(place.box)
        panel.write(place.x, place.y, group.label, f"label halo {svg.style(group.style)}", place.anchor)
