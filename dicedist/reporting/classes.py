"""The per-class view: on which classes the ensemble is right, and what it gains there over its members."""

import statistics
from collections.abc import Sequence
from html import escape

from dicedist.reporting import svg
from dicedist.reporting.markup import Section, cell, figure, folded, grid, legend, table, unevaluated
from dicedist.reporting.records import Group, Pooled, pool
from dicedist.reporting.svg import BOTTOM, CIRCLE, TOP, Axis, Panel, number

MOST_ROWS, MOST_LISTED = 20, 100
ROW = 19
LONGEST_NAME = 20
Row = tuple[str, Pooled, Pooled]  # a class, the ensemble's accuracy, the mean accuracy of its members, in %


def section(groups: Sequence[Group]) -> Section | None:
    evaluated = [group for group in groups if group.evaluations]
    if not evaluated:
        return None
    by_data: dict[str, list[Group]] = {}
    for group in evaluated:
        by_data.setdefault(group.settings["data.name"], []).append(group)
    members, ensemble = svg.legend_key(None, hollow=True, line="thick"), svg.legend_key(None, line="thick")
    return Section(
        "classes",
        "Classes",
        "Test accuracy on each class, the hardest first. The bar between the two marks is what the ensemble gains over "
        "its members.",
        legend([(members, "mean of the members"), (ensemble, "ensemble")])
        + "".join(map(one_data_set, by_data.values()))
        + unevaluated(groups),
    )


def one_data_set(groups: Sequence[Group]) -> str:
    rows = {group.label: class_rows(group) for group in groups}
    names = list(dict.fromkeys(row[0] for found in rows.values() for row in found))
    means = {
        name: statistics.fmean(
            ensemble.mean for found in rows.values() for label, ensemble, _ in found if label == name
        )
        for name in names
    }
    order = sorted(names, key=lambda name: means[name])
    hardest = order[:MOST_ROWS]
    note = f"the {MOST_ROWS} hardest of {len(order)} classes" if len(order) > MOST_ROWS else ""
    chosen = {label: [row for row in found if row[0] in hardest] for label, found in rows.items()}
    x = svg.axis("test accuracy, %", (value.mean for found in chosen.values() for row in found for value in row[1:]))
    figures = [
        figure(group.label, dumbbells(group, sorted(chosen[group.label], key=lambda row: order.index(row[0])), x), note)
        for group in groups
    ]
    listed = order[:MOST_LISTED]
    title = "All classes" if len(listed) == len(order) else f"The {MOST_LISTED} hardest of {len(order):,} classes"
    return grid(figures) + folded(f"{title} as a table", class_table(groups, rows, listed))


def class_rows(group: Group) -> list[Row]:
    """One row per class that has test images."""
    columns = [evaluation["per_class"] for evaluation in group.evaluations]
    names = group.evaluations[0].get("class_names") or [f"class {k}" for k in range(len(columns[0]["ensemble"]))]
    rows = []
    for place, name in enumerate(names):
        ensemble, members = (pool(column[who][place] for column in columns) for who in ("ensemble", "members"))
        if ensemble is not None and members is not None:
            rows.append((name, ensemble.times(100), members.times(100)))
    return rows


def dumbbells(group: Group, rows: Sequence[Row], x: Axis) -> str:
    widest = max(svg.width_of(short(name)) for name, _, _ in rows)
    panel = Panel(x, Axis("class", 0, len(rows), ()), height=TOP + BOTTOM + ROW * len(rows), left=14 + widest)
    for place, (name, ensemble, members) in enumerate(rows):
        height = len(rows) - place - 0.5
        panel.write(panel.left - 8, panel.y(height) + 4, short(name), "tick", "end")
        panel.line([(members.mean, height), (ensemble.mean, height)], group.style, "thick")
        tip = f"{name}: ensemble {number(ensemble.mean)} %, members {number(members.mean)} %"
        panel.mark(members.mean, height, group.style, tip, 3.5, True, CIRCLE)
        panel.mark(ensemble.mean, height, group.style, tip, 4.5, False, CIRCLE)
    gains = [ensemble.mean - members.mean for _, ensemble, members in rows]
    hardest, easiest = rows[0], rows[-1]
    return panel.draw(
        f"Accuracy of {group.label} on {len(rows)} classes, from {hardest[0]} with {number(hardest[1].mean)} % to "
        f"{easiest[0]} with {number(easiest[1].mean)} %; the ensemble gains {number(statistics.fmean(gains))} "
        "percentage points over its members on average."
    )


def short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def class_table(groups: Sequence[Group], rows: dict[str, list[Row]], order: Sequence[str]) -> str:
    cells = {
        (label, name): cell(ensemble, 1) + cell(members, 1)
        for label, found in rows.items()
        for name, ensemble, members in found
    }
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(cells.get((group.label, name), "<td></td><td></td>") for group in groups)
        + "</tr>"
        for name in order
    ]
    tops = "".join(f'<th scope="colgroup" colspan="2">{escape(group.label)}</th>' for group in groups)
    unders = '<th scope="col">ensemble</th><th scope="col">members</th>' * len(groups)
    head = f'<tr><th rowspan="2" scope="col">class</th>{tops}</tr><tr>{unders}</tr>'
    return table("Test accuracy by class, %", head, [("", lines)], 1 + 2 * len(groups))
