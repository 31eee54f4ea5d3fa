"""Accuracy by class: of the ensemble, and its gain over the members."""

import statistics
from collections.abc import Mapping, Sequence

from dicedist.reporting import svg
from dicedist.reporting.markup import Head, Section, Table, estimate
from dicedist.reporting.records import Group, Pooled, distinct, pool
from dicedist.reporting.svg import BOTTOM, CIRCLE, TOP, Axis, Figure, Panel, number

MOST_ROWS, MOST_LISTED = 20, 100
ROW = 19
LONGEST_NAME = 20
Rates = Mapping[str, tuple[Pooled, Pooled]]  # class -> accuracy of the ensemble, mean accuracy of its members, in %


def section(groups: Sequence[Group]) -> Section:
    data = distinct(group.settings["data.name"] for group in groups)
    sets = [one_data_set([group for group in groups if group.settings["data.name"] == name]) for name in data]
    return Section("report/classes", "Classes", {"sets": sets})


def one_data_set(groups: Sequence[Group]) -> tuple[list[Figure], str, Table]:
    """Return figures of the hardest classes, and a longer table with its title."""
    rates = [class_rates(group) for group in groups]
    means: dict[str, list[float]] = {}
    for name, (ensemble, _) in (rate for own in rates for rate in own.items()):
        means.setdefault(name, []).append(ensemble.mean)
    order = sorted(means, key=lambda name: statistics.fmean(means[name]))
    shown = [{name: own[name] for name in order[:MOST_ROWS] if name in own} for own in rates]
    x = svg.axis("test accuracy, %", (value.mean for own in shown for pair in own.values() for value in pair))
    note = f"the {MOST_ROWS} hardest of {len(order)} classes" if len(order) > MOST_ROWS else ""
    figures = [dumbbells(group, own, x, note) for group, own in zip(groups, shown, strict=True)]
    listed = order[:MOST_LISTED]
    title = "All classes" if len(listed) == len(order) else f"The {MOST_LISTED} hardest of {len(order):,} classes"
    return figures, title, class_table(groups, rates, listed)


def class_rates(group: Group) -> Rates:
    """Return the accuracies by class, for classes with test images."""
    columns = [evaluation["per_class"] for evaluation in group.evaluations]
    names = group.evaluations[0].get("class_names") or [f"class {k}" for k in range(len(columns[0]["ensemble"]))]
    found = {}
    for place, name in enumerate(names):
        ensemble, members = (pool(column[who][place] for column in columns) for who in ("ensemble", "members"))
        if ensemble is not None and members is not None:
            found[name] = ensemble.times(100), members.times(100)
    return found


def dumbbells(group: Group, rates: Rates, x: Axis, note: str) -> Figure:
    widest = max(svg.width_of(short(name)) for name in rates)
    panel = Panel(x, Axis("class", 0, len(rates), ()), height=TOP + BOTTOM + ROW * len(rates), left=14 + widest)
    for place, (name, (ensemble, members)) in enumerate(rates.items()):
        height = len(rates) - place - 0.5
        panel.write(panel.left - 8, panel.y(height) + 4, short(name), "tick", "end")
        panel.line([(members.mean, height), (ensemble.mean, height)], group.style, "thick")
        tip = f"{name}: ensemble {number(ensemble.mean)} %, members {number(members.mean)} %"
        panel.mark(members.mean, height, group.style, tip, 3.5, True, CIRCLE)
        panel.mark(ensemble.mean, height, group.style, tip, 4.5, False, CIRCLE)
    gain = statistics.fmean(ensemble.mean - members.mean for ensemble, members in rates.values())
    said = [f"{name} with {number(ensemble.mean)} %" for name, (ensemble, _) in rates.items()]
    seen = (
        f"Accuracy of {group.label} on {len(rates)} classes, from {said[0]} to {said[-1]}; "
        f"the ensemble gains {number(gain)} percentage points over its members on average."
    )
    return panel.figure(group.label, seen, note)


def short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def class_table(groups: Sequence[Group], rates: Sequence[Rates], names: Sequence[str]) -> Table:
    rows = [[name, *(estimate(value, 1) for own in rates for value in own.get(name, (None, None)))] for name in names]
    heads = [Head(title, group.label) for group in groups for title in ("ensemble", "members")]
    return Table("Test accuracy by class, %", [Head("class"), *heads], rows)
