"""What diversity costs: a key of a method varied, and where that leaves its members and its ensemble."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dicedist.metrics.statistics import Interval
from dicedist.reporting import svg
from dicedist.reporting.contrasts import Column, Evaluation, against, columns, difference_text, head, row_of
from dicedist.reporting.markup import Section, figure, fixed, grid, legend, remark, table
from dicedist.reporting.records import Pooled
from dicedist.reporting.svg import Panel, number


@dataclass(frozen=True)
class Stop:
    """A point of a trade-off curve: a value of the varied key, by seed and pooled over seeds."""

    value: str
    evaluations: Sequence[Evaluation]
    accuracy: Pooled  # of the members, in %
    ratio: Pooled

    @property
    def bar(self) -> tuple[float, float]:
        """The accuracy less and plus its deviation over seeds."""
        spread = self.accuracy.deviation or 0.0
        return self.accuracy.mean - spread, self.accuracy.mean + spread


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


def section(curves: Sequence[Curve]) -> Section:
    stops = [stop for curve in curves for stop in curve.stops]
    panel = Panel(
        svg.axis("mean accuracy of the members, test, %", (x for stop in stops for x in stop.bar)),
        svg.axis("ratio-error: single per shared error, test", (stop.ratio.mean for stop in stops)),
        height=270,
    )
    for curve in curves:
        panel.line([(stop.accuracy.mean, stop.ratio.mean) for stop in curve.stops], curve.style, "thin")
        for stop in curve.stops:
            panel.line([(x, stop.ratio.mean) for x in stop.bar], curve.style, "thin")
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
        row_of(curve.name, curve.style, [fixed(interpolated(curve, place), 3) for place in places]) for curve in varied
    ]
    caption = "Ratio-error at equal accuracy of members, between the points of the curves"
    return table(caption, f'<tr><th scope="col">method</th>{titles}</tr>', [("", rows)], 5)


def interpolated(curve: Curve, accuracy: float) -> float:
    """The highest ratio-error that the curve has at this accuracy: a method may be run at its best point."""
    found = []
    for first, second in pairwise(curve.stops):
        start, end = first.accuracy.mean, second.accuracy.mean
        if min(start, end) <= accuracy <= max(start, end):
            share = (accuracy - start) / (end - start) if end != start else 0.0
            found.append(first.ratio.mean + share * (second.ratio.mean - first.ratio.mean))
    return max(found)


def beside_the_first(curves: Sequence[Curve]) -> str:
    found = variations(curves)
    if not found:
        return ""
    rows = [row_of(one.name, one.style, [difference_text(d, c.measure) for c, d in one.apart]) for one in found]
    shown = [column for column, _ in found[0].apart]
    return table(
        "A value of the varied key to its first: paired t over seeds", head(shown), [("", rows)], 1 + len(shown)
    )


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
