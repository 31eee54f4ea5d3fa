"""The page of a search: history, importance of keys, and the objective against every key."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicedist.console.lines import plural
from dicedist.metrics.measures import Measure
from dicedist.reporting import svg
from dicedist.reporting.markup import Section
from dicedist.reporting.page import document
from dicedist.reporting.records import distinct
from dicedist.reporting.svg import Axis, Figure, Panel, number

COMPLETE, PRUNED, BEST = 0, 4, 2  # styles
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
    values: Sequence[float]  # of the objectives in their units; empty until complete
    course: Sequence[tuple[float, float]]  # epochs and objective
    is_best: bool  # for several objectives: on the Pareto front
    reason: str  # why it failed


def search_page(aims: Sequence[Aim], attempts: Sequence[Attempt], importance: Mapping[str, float]) -> str:
    complete = [one for one in attempts if one.values]
    keys = distinct(key for one in attempts for key in one.written)
    styles = {"complete": COMPLETE, "pruned": PRUNED, "best": BEST}
    figures = [by_trial(aims, place, attempts, complete) for place in range(len(aims))]
    if len(aims) == 1:
        figures += courses(aims[0], [one for one in attempts if len(one.course) > 1])
    if len(aims) == 2:
        x, y = ([one.values[place] for one in complete] for place in (0, 1))
        axes = svg.axis(aims[0].title, x), svg.axis(aims[1].title, y)
        seen = f"{aims[1].title} against {aims[0].title}."
        figures.append(dots(Panel(*axes), complete, x, y).figure("Pareto front", seen))
    sections = [Section("search/history", "History", {"styles": styles, "figures": figures})]
    if importance:
        ordered = sorted(importance.items(), key=lambda entry: -entry[1])
        sections.append(Section("search/importance", "Which keys mattered", {"importance": ordered}))
    if complete:
        sections.append(Section("search/slices", "Slices", {"figures": [piece(k, aims[0], complete) for k in keys]}))
    titles = ["trial", *(aim.title for aim in aims), *keys, "outcome"]
    listed = {"aims": aims, "attempts": attempts, "keys": keys, "titles": titles, "outcomes": OUTCOMES}
    about = f"{plural(len(attempts), 'trial')} · chosen on validation inputs, the test set was not read"
    return document("Search", about, [*sections, Section("search/trials", "Trials", listed)])


def dots(panel: Panel, attempts: Sequence[Attempt], x: Sequence[float], y: Sequence[float]) -> Panel:
    for one, right, up in zip(attempts, x, y, strict=True):
        chosen = ", ".join(f"{key} {value}" for key, value in one.written.items())
        tip = f"trial {one.number}: {panel.y_axis.label} {number(up, 4)}; {chosen}"
        panel.mark(right, up, BEST if one.is_best else COMPLETE, tip, 3)
    return panel


def by_trial(aims: Sequence[Aim], place: int, attempts: Sequence[Attempt], complete: Sequence[Attempt]) -> Figure:
    aim, numbers, values = aims[place], [one.number for one in complete], [one.values[place] for one in complete]
    better = max if aim.measure.better == "higher" else min
    best = [better(values[: nth + 1]) for nth in range(len(values))]
    panel = Panel(svg.axis("trial", [0, max(one.number for one in attempts)]), svg.axis(aim.title, values))
    panel.line(zip(numbers, best, strict=True), BEST)
    seen = f"{aim.title} of {len(values)} trials; the best came to {number(best[-1], 4)}."
    return dots(panel, complete, numbers, values).figure(f"{aim.title} by trial", seen, "the line is the best so far")


def courses(aim: Aim, attempts: Sequence[Attempt]) -> list[Figure]:
    heights = sorted(y for one in attempts for _, y in one.course if math.isfinite(y))
    if not heights:
        return []
    inner = heights[len(heights) // 50 : len(heights) - len(heights) // 50] or heights
    panel = Panel(svg.axis("epoch", [0, *(x for one in attempts for x, _ in one.course)]), svg.axis(aim.title, inner))
    for one in attempts:
        panel.line(one.course, PRUNED if one.state == "pruned" else COMPLETE, "thin")
    return [panel.figure("Courses", f"{aim.title} by epoch of {len(attempts)} trials.")]


def piece(key: str, aim: Aim, complete: Sequence[Attempt]) -> Figure:
    places, x_axis = placed(key, complete)
    heights = [one.values[0] for one in complete]
    panel = dots(Panel(x_axis, svg.axis(aim.title, heights)), complete, places, heights)
    return panel.figure(key, f"{aim.title} against {key}.")


def placed(key: str, complete: Sequence[Attempt]) -> tuple[list[float], Axis]:
    """Return the places of the trials and their axis: logarithmic if numbers span a decade, and even for words."""
    if all(key in one.numbers for one in complete):
        numbers = [one.numbers[key] for one in complete]
        if min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
            logarithms = [math.log10(value) for value in numbers]
            return logarithms, svg.axis(f"log10 {key}", logarithms)
        return numbers, svg.axis(key, numbers)
    words = sorted({one.written[key] for one in complete})
    spots = [float(words.index(one.written[key])) for one in complete]
    label = "; ".join(f"{place}: {word}" for place, word in enumerate(words))
    return spots, svg.span(label, -0.5, len(words) - 0.5, len(words))
