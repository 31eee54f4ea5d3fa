"""The page and the Markdown table of a comparison that was decided beforehand: intervals, and the cost of diversity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, OOD, Measure
from dicedist.metrics.statistics import Interval, over_seeds, paired_over_seeds
from dicedist.reporting import svg
from dicedist.reporting.markup import Section, figure, fixed, grid, legend, remark, table
from dicedist.reporting.records import Pooled, dig
from dicedist.reporting.svg import Panel, number

BY_NAME = {measure.name: measure for measure in (*ENSEMBLE, *DIVERSITY, *OOD)}
Evaluation = Mapping[str, Any]  # an evaluation.json
Reading = Callable[[Evaluation], float | None]


@dataclass(frozen=True)
class Column:
    title: str
    measure: Measure
    read: Reading


@dataclass(frozen=True)
class Contender:
    """A method of the comparison: its evaluations by seed, and what its search cost."""

    name: str
    style: int
    evaluations: Sequence[Evaluation]
    chosen: Mapping[str, str]  # by the search
    trials: Mapping[str, int]  # outcome -> how many
    inputs: Mapping[str, Interval]  # name of a measure -> bootstrap of the difference from the baseline over inputs


@dataclass(frozen=True)
class Stop:
    """A point of a trade-off curve: a value of the varied key, by seed and pooled over seeds."""

    value: str
    evaluations: Sequence[Evaluation]
    accuracy: Pooled  # of the members, in %
    ratio: Pooled


@dataclass(frozen=True)
class Curve:
    name: str
    style: int
    key: str  # empty for a method that was not varied
    stops: Sequence[Stop]


@dataclass(frozen=True)
class Variation:
    """A value of a curve's key beside the curve's first value, paired over seeds."""

    name: str
    style: int
    apart: Sequence[tuple[Column, Interval]]


@dataclass(frozen=True)
class Comparison:
    title: str
    question: str
    commit: str
    objective: str
    baseline: Contender
    contenders: Sequence[Contender]  # the baseline among them
    curves: Sequence[Curve]

    @property
    def columns(self) -> list[Column]:
        return columns([evaluation for one in self.contenders for evaluation in one.evaluations])

    @property
    def about(self) -> str:
        seeds = len(self.baseline.evaluations)
        return f"{seeds} seeds of each method · protocol committed as {self.commit[:10]} before the test set was read"


def columns(evaluations: Sequence[Evaluation]) -> list[Column]:
    """The columns in which all have a value."""
    before_and_after = [
        Column(f"{BY_NAME[name].title} {when}", BY_NAME[name], reading(part, name))
        for name in ("nll", "ece", "brier")
        for when, part in (("before T", "ensemble"), ("after T", "ensemble_tempered"))
    ]
    known = [
        Column("ensemble accuracy", BY_NAME["accuracy"], reading("ensemble", "accuracy")),
        Column("members' accuracy", BY_NAME["accuracy"], reading("members", "accuracy")),
        *before_and_after,
        Column(BY_NAME["ratio_error"].title, BY_NAME["ratio_error"], reading("diversity", "ratio_error")),
        *(Column(f"OOD AUROC, {score}", BY_NAME["auroc"], ood_reading(score)) for score in ("max_softmax", "dice_x_w")),
    ]
    return [column for column in known if all(column.read(evaluation) is not None for evaluation in evaluations)]


def reading(*path: str) -> Reading:
    return lambda evaluation: dig(evaluation, path)


def ood_reading(score: str) -> Reading:
    """The mean over OOD sets."""

    def read(evaluation: Evaluation) -> float | None:
        found = [scores[score]["auroc"] for scores in evaluation.get("ood", {}).values() if score in scores]
        return sum(found) / len(found) if found else None

    return read


def values(evaluations: Sequence[Evaluation], column: Column) -> list[float]:
    return [column.measure.scale * value for e in evaluations if (value := column.read(e)) is not None]


def sections(comparison: Comparison) -> list[Section]:
    shown = comparison.columns
    found = [means(comparison, shown), differences(comparison, shown)]
    if comparison.curves:
        found.append(tradeoff(comparison.curves))
    return [*found, budget(comparison)]


def means(comparison: Comparison, shown: Sequence[Column]) -> Section:
    rows = [
        row_of(one, [mean_text(over_seeds(values(one.evaluations, column)), column.measure) for column in shown])
        for one in comparison.contenders
    ]
    return Section(
        "means",
        "Results",
        f"{comparison.question} Test set, mean ± sample deviation over seeds. Before and after T: temperature scaling, "
        "fitted on one half of the test set and measured on the other.",
        table("Mean and deviation over seeds", head(shown), [("", rows)], 1 + len(shown)),
    )


def differences(comparison: Comparison, shown: Sequence[Column]) -> Section:
    baseline = comparison.baseline
    others = [one for one in comparison.contenders if one is not baseline]
    rows = [
        row_of(one, [difference_text(d, c.measure) for c, d in against(one.evaluations, baseline.evaluations, shown)])
        for one in others
    ]
    named = sorted({name for one in others for name in one.inputs})
    under = [
        row_of(one, [difference_text(one.inputs[name], BY_NAME[name]) for name in named])
        for one in others
        if one.inputs
    ]
    titles = "".join(f'<th scope="col">{escape(BY_NAME[name].heading)}</th>' for name in named)
    return Section(
        "differences",
        f"Differences from {baseline.name}",
        "With 95 % intervals; bold where the interval leaves zero out. With so many cells some will by chance: one in "
        "twenty where there is no difference at all.",
        table("Over seeds: paired t", head(shown), [("", rows)], 1 + len(shown))
        + table(
            "Over test inputs: paired bootstrap of the mean over seeds",
            f'<tr><th scope="col">method</th>{titles}</tr>',
            [("", under)],
            1 + len(named),
        ),
    )


def against(
    own: Sequence[Evaluation], others: Sequence[Evaluation], shown: Sequence[Column]
) -> list[tuple[Column, Interval]]:
    return [(c, paired_over_seeds(values(own, c), values(others, c))) for c in shown]


def head(shown: Sequence[Column]) -> str:
    titles = (f"{column.title}{', ' + column.measure.unit if column.measure.unit else ''}" for column in shown)
    cells = (
        f'<th scope="col">{escape(title + column.measure.arrow)}</th>'
        for title, column in zip(titles, shown, strict=True)
    )
    return f'<tr><th scope="col">method</th>{"".join(cells)}</tr>'


def row_of(one: Contender | Variation, cells: Sequence[str]) -> str:
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{svg.legend_key(one.style)}{escape(one.name)}</th>{shown}</tr>'


def mean_text(interval: Interval, measure: Measure) -> str:
    spread = "" if interval.deviation is None else f" <small>± {fixed(interval.deviation, measure.decimals)}</small>"
    return fixed(interval.mean, measure.decimals) + spread


def difference_text(
    interval: Interval,
    measure: Measure,
    bold: tuple[str, str] = ("<b>", "</b>"),
    grey: tuple[str, str] = ('<span class="unclear">', "</span>"),
) -> str:
    """Bold where the interval leaves 0 out, grey where it does not or is not known."""
    text = signed(interval.mean, measure.decimals)
    if interval.lower is not None and interval.upper is not None:
        text += f" [{signed(interval.lower, measure.decimals)}, {signed(interval.upper, measure.decimals)}]"
    before, after = bold if interval.excludes_zero else grey
    return f"{before}{text}{after}"


def signed(value: float, decimals: int) -> str:
    return ("+" if value > 0 else "") + fixed(value, decimals)


def tradeoff(curves: Sequence[Curve]) -> Section:
    dots = [(stop.accuracy.mean, stop.ratio.mean) for curve in curves for stop in curve.stops]
    panel = Panel(
        svg.axis("mean accuracy of the members, test, %", (x for x, _ in dots)),
        svg.axis("ratio-error: single per shared error, test", (y for _, y in dots)),
        height=270,
    )
    for curve in curves:
        panel.line([(stop.accuracy.mean, stop.ratio.mean) for stop in curve.stops], curve.style, "thin")
        for stop in curve.stops:
            spread = stop.accuracy.deviation or 0.0
            panel.line([(stop.accuracy.mean + sign * spread, stop.ratio.mean) for sign in (-1, 1)], curve.style, "thin")
            tip = f"{curve.name} {curve.key.rpartition('.')[2]} {stop.value}, mean of {stop.ratio.n}"
            panel.mark(stop.accuracy.mean, stop.ratio.mean, curve.style, tip, 4)
    words = "; ".join(
        f"{curve.name} from {number(curve.stops[0].ratio.mean)} at {number(curve.stops[0].accuracy.mean, 4)} % to "
        f"{number(curve.stops[-1].ratio.mean)} at {number(curve.stops[-1].accuracy.mean, 4)} %"
        for curve in curves
    )
    names = ((svg.legend_key(c.style), c.name + (f" ({c.key} varied)" if c.key else "")) for c in curves)
    return Section(
        "cost",
        "What diversity costs",
        "Up is more diverse, to the right are better members; a curve that lies above another is more diverse at the "
        "same accuracy. Bars are deviations of accuracy over seeds.",
        legend(names)
        + grid(
            [figure("Diversity against individual accuracy, one key varied", panel.draw(f"Ratio-error: {words}."))],
            "two",
        )
        + equal_accuracy(curves)
        + beside_the_first(curves),
    )


def equal_accuracy(curves: Sequence[Curve]) -> str:
    """Ratio-errors at accuracies that all varied methods reach, read between the points of their curves."""
    varied = [curve for curve in curves if len(curve.stops) > 1]
    if len(varied) < 2:
        return ""
    low = max(min(stop.accuracy.mean for stop in curve.stops) for curve in varied)
    high = min(max(stop.accuracy.mean for stop in curve.stops) for curve in varied)
    if low >= high:
        return remark("The curves have no accuracy of members in common.")
    places = [low + (high - low) * nth / 3 for nth in range(4)]
    titles = "".join(f'<th scope="col">at {place:.2f} %</th>' for place in places)
    rows = [
        f'<tr><th scope="row">{svg.legend_key(curve.style)}{escape(curve.name)}</th>'
        + "".join(f"<td>{fixed(interpolated(curve, place), 3)}</td>" for place in places)
        + "</tr>"
        for curve in varied
    ]
    caption = "Ratio-error at equal accuracy of members, between the points of the curves"
    return table(caption, f'<tr><th scope="col">method</th>{titles}</tr>', [("", rows)], 5)


def variations(curves: Sequence[Curve]) -> list[Variation]:
    shown = columns([evaluation for curve in curves for stop in curve.stops for evaluation in stop.evaluations])
    return [
        Variation(
            f"{curve.name}, {curve.key.rpartition('.')[2]} {stop.value} to {curve.stops[0].value}",
            curve.style,
            against(stop.evaluations, curve.stops[0].evaluations, shown),
        )
        for curve in curves
        for stop in curve.stops[1:]
    ]


def beside_the_first(curves: Sequence[Curve]) -> str:
    found = variations(curves)
    if not found:
        return ""
    rows = [row_of(one, [difference_text(d, c.measure) for c, d in one.apart]) for one in found]
    shown = [column for column, _ in found[0].apart]
    return table(
        "A value of the varied key to its first: paired t over seeds", head(shown), [("", rows)], 1 + len(shown)
    )


def interpolated(curve: Curve, accuracy: float) -> float:
    """The highest ratio-error that the curve has at this accuracy: a method may be run at its best point."""
    found = []
    for first, second in pairwise(curve.stops):
        start, end = first.accuracy.mean, second.accuracy.mean
        if min(start, end) <= accuracy <= max(start, end):
            share = (accuracy - start) / (end - start) if end != start else 0.0
            found.append(first.ratio.mean + share * (second.ratio.mean - first.ratio.mean))
    return max(found)


def budget(comparison: Comparison) -> Section:
    rows = []
    for one in comparison.contenders:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in one.trials.items())
        chosen = ", ".join(f"{key}={value}" for key, value in one.chosen.items())
        cells = f'<td class="text">{escape(counted)}</td><td class="text wrap">{escape(chosen)}</td>'
        rows.append(f'<tr><th scope="row">{escape(one.name)}</th>{cells}<td>{len(one.evaluations)}</td></tr>')
    titles = ("method", "trials of the search", "chosen")
    top = "".join(f'<th scope="col" class="text">{title}</th>' for title in titles)
    top += '<th scope="col">seeds measured on the test set</th>'
    return Section(
        "budget",
        "Every trial",
        f"All methods had the same number of trials, and were chosen by {comparison.objective} on validation inputs.",
        table("Budgets", f"<tr>{top}</tr>", [("", rows)], 4),
    )


def markdown(comparison: Comparison) -> str:
    """The tables of results and differences, for docs/."""
    shown, baseline = comparison.columns, comparison.baseline
    rows = []
    for one in comparison.contenders:
        cells = []
        for column in shown:
            found, decimals = over_seeds(values(one.evaluations, column)), column.measure.decimals
            spread = "" if found.deviation is None else f" ± {found.deviation:.{decimals}f}"
            cells.append(f"{found.mean:.{decimals}f}{spread}")
        rows.append([one.name, *cells])
    others = [one for one in comparison.contenders if one is not baseline]
    apart = [apart_row(one.name, against(one.evaluations, baseline.evaluations, shown)) for one in others]
    trials = sum(sum(one.trials.values()) for one in comparison.contenders)
    pieces = [
        f"{comparison.title}: {comparison.about}; {trials} trials of search, equally many for each method.",
        lines(shown, rows),
        f"Differences from {baseline.name}, paired over seeds, 95 % intervals (bold: zero left out):",
        lines(shown, apart),
    ]
    if varied := variations(comparison.curves):
        pieces += [
            "One key varied, differences from its first value, paired over seeds:",
            lines([column for column, _ in varied[0].apart], [apart_row(one.name, one.apart) for one in varied]),
        ]
    return "\n\n".join(pieces) + "\n"


def apart_row(name: str, apart: Sequence[tuple[Column, Interval]]) -> list[str]:
    return [name, *(difference_text(d, c.measure, ("**", "**"), ("", "")) for c, d in apart)]


def lines(shown: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    heading = ["method", *(f"{c.title}{', ' + c.measure.unit if c.measure.unit else ''}" for c in shown)]
    every = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in every)
