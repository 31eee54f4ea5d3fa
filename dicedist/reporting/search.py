"""The page of a search: its history, which keys mattered, and the measure against every key."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dicedist.console.lines import plural
from dicedist.metrics.measures import Measure
from dicedist.reporting import svg
from dicedist.reporting.markup import Section, figure, fixed, grid, legend, table
from dicedist.reporting.page import document
from dicedist.reporting.svg import Axis, Panel, number
from dicedist.runs.files import replace_text

COMPLETE, PRUNED, BEST = 0, 4, 2  # styles
LEGEND = ((COMPLETE, "a complete trial"), (PRUNED, "ended early"), (BEST, "the best"))
OUTCOMES = {"complete": "complete", "pruned": "ended early", "fail": "failed", "running": "under way"}


@dataclass(frozen=True)
class Aim:
    title: str
    measure: Measure


@dataclass(frozen=True)
class Attempt:
    """A trial of a search."""

    number: int
    state: str  # complete | pruned | fail | running
    written: Mapping[str, str]  # key -> value, as an override takes it
    numbers: Mapping[str, float]  # of the keys that have numbers
    values: Sequence[float]  # of the objectives, once complete
    course: Sequence[tuple[float, float]]  # epochs, and the objective after them
    reason: str = ""  # why it failed


def write_search_page(
    aims: Sequence[Aim],
    attempts: Sequence[Attempt],
    winners: Collection[int],
    importance: Mapping[str, float],
    output: Path,
) -> None:
    sections = [history(aims, attempts, winners)]
    if importance:
        sections.append(importances(importance))
    if slices := sliced(aims[0], attempts, winners):
        sections.append(slices)
    sections.append(listed(aims, attempts, winners))
    about = f"{plural(len(attempts), 'trial')} · chosen on validation inputs, the test set was not read"
    replace_text(output, document("Search", about, sections))


def history(aims: Sequence[Aim], attempts: Sequence[Attempt], winners: Collection[int]) -> Section:
    complete = [one for one in attempts if one.values]
    figures = []
    for place, aim in enumerate(aims):
        scale, better = aim.measure.scale, max if aim.measure.better == "higher" else min
        values = [(one, scale * one.values[place]) for one in complete]
        panel = Panel(
            svg.axis("trial", [0, max(one.number for one in attempts)]), svg.axis(aim.title, [y for _, y in values])
        )
        best = [(one.number, better(y for _, y in values[: nth + 1])) for nth, (one, _) in enumerate(values)]
        panel.line(best, BEST)
        for one, y in values:
            panel.mark(one.number, y, BEST if one.number in winners else COMPLETE, tip(one, aim, y), 3)
        seen = f"{aim.title} of {len(values)} trials; the best came to {number(best[-1][1], 4)}."
        figures.append(figure(f"{aim.title} by trial", panel.draw(seen), "the line is the best so far"))
    if len(aims) == 1 and (picture := courses(aims[0], attempts)):
        figures.append(picture)
    if len(aims) == 2:
        figures.append(front(aims, complete, winners))
    return Section(
        "history",
        "History",
        "One mark per trial that ran to its end. A trial that was worse than the median of the others at the same "
        "epoch was ended early: its curve breaks off.",
        legend((svg.legend_key(place), words) for place, words in LEGEND) + grid(figures, "two"),
    )


def courses(aim: Aim, attempts: Sequence[Attempt]) -> str:
    drawn = [one for one in attempts if len(one.course) > 1]
    if not drawn:
        return ""
    scale = aim.measure.scale
    heights = sorted(scale * y for one in drawn for _, y in one.course if math.isfinite(y))
    inner = heights[len(heights) // 50 : len(heights) - len(heights) // 50] or heights
    panel = Panel(svg.axis("epoch", [0, *(x for one in drawn for x, _ in one.course)]), svg.axis(aim.title, inner))
    for one in drawn:
        panel.line([(x, scale * y) for x, y in one.course], PRUNED if one.state == "pruned" else COMPLETE, "thin")
    return figure("Courses", panel.draw(f"{aim.title} by epoch of {len(drawn)} trials."))


def front(aims: Sequence[Aim], complete: Sequence[Attempt], winners: Collection[int]) -> str:
    """Two objectives against each other; the winners are those that no other is better than in both."""
    first, second = ([aim.measure.scale * one.values[place] for one in complete] for place, aim in enumerate(aims))
    panel = Panel(svg.axis(aims[0].title, first), svg.axis(aims[1].title, second))
    for one, x, y in zip(complete, first, second, strict=True):
        panel.mark(x, y, BEST if one.number in winners else COMPLETE, f"trial {one.number}", 4)
    return figure("Pareto front", panel.draw(f"{aims[1].title} against {aims[0].title}."))


def importances(importance: Mapping[str, float]) -> Section:
    ordered = sorted(importance.items(), key=lambda entry: -entry[1])
    rows = [
        f'<tr><th scope="row">{escape(key)}</th><td>{fixed(100 * share, 0)} %</td>'
        f'<td class="text"><svg viewBox="0 0 200 10" width="200" height="10" class="{svg.style(BEST)}" '
        f'aria-hidden="true"><path class="mark" d="M0 0H{200 * share:.1f}V10H0z"/></svg></td></tr>'
        for key, share in ordered
    ]
    head = '<tr><th scope="col">key</th><th scope="col">share</th><th scope="col" class="text"></th></tr>'
    return Section(
        "importance",
        "Which keys mattered",
        "How much each key decides whether a trial is among the better quarter (PED-ANOVA). With few trials this is "
        "a hint, not a finding.",
        table("Importance of keys", head, [("", rows)], 3),
    )


def sliced(aim: Aim, attempts: Sequence[Attempt], winners: Collection[int]) -> Section | None:
    complete = [one for one in attempts if one.values]
    keys = list(dict.fromkeys(key for one in complete for key in one.written))
    figures = [figure(key, piece(key, aim, complete, winners)) for key in keys]
    lead = "The measure of each complete trial against the value of one key; the other keys vary as well."
    return Section("slices", "Slices", lead, grid(figures)) if figures else None


def piece(key: str, aim: Aim, complete: Sequence[Attempt], winners: Collection[int]) -> str:
    places, x_axis = placed(key, complete)
    heights = [aim.measure.scale * one.values[0] for one in complete]
    panel = Panel(x_axis, svg.axis(aim.title, heights))
    for one, x, y in zip(complete, places, heights, strict=True):
        panel.mark(x, y, BEST if one.number in winners else COMPLETE, f"{tip(one, aim, y)}; {one.written[key]}", 3)
    return panel.draw(f"{aim.title} against {key}.")


def placed(key: str, complete: Sequence[Attempt]) -> tuple[list[float], Axis]:
    """Where trials stand: numbers that span a decade by their logarithm, words side by side."""
    if all(key in one.numbers for one in complete):
        numbers = [one.numbers[key] for one in complete]
        if min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
            logarithms = [math.log10(value) for value in numbers]
            return logarithms, svg.axis(f"log10 {key}", logarithms)
        return numbers, svg.axis(key, numbers)
    words = sorted({one.written[key] for one in complete})
    named = "; ".join(f"{place}: {word}" for place, word in enumerate(words))
    spots = [float(words.index(one.written[key])) for one in complete]
    return spots, svg.span(named, -0.5, len(words) - 0.5, len(words))


def listed(aims: Sequence[Aim], attempts: Sequence[Attempt], winners: Collection[int]) -> Section:
    keys = list(dict.fromkeys(key for one in attempts for key in one.written))
    titles = ["trial", *(aim.title for aim in aims), *keys, "outcome"]
    head = "<tr>" + "".join(f'<th scope="col">{escape(title)}</th>' for title in titles) + "</tr>"
    rows = []
    for one in attempts:
        values = [
            fixed(aim.measure.scale * one.values[place], aim.measure.decimals) if one.values else "–"
            for place, aim in enumerate(aims)
        ]
        outcome = ("best, " if one.number in winners else "") + OUTCOMES.get(one.state, one.state)
        cells = [*values, *(one.written.get(key, "–") for key in keys), f"{outcome} {one.reason}".strip()]
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{one.number}</th>{shown}</tr>')
    body = table("Every trial", head, [("", rows)], len(titles))
    return Section("trials", "Trials", "Every trial counts, also those that failed.", body)


def tip(one: Attempt, aim: Aim, value: float) -> str:
    return f"trial {one.number}: {aim.title} {number(value, 4)}"
