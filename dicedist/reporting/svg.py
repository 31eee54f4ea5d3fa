"""Charts as SVG text: an axis, a panel to draw on, and markers that tell ensembles apart without their colours.

Colours come from the style sheet: the class s0, s1, ... sets `currentColor`, so figures follow the light or dark theme.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

NUM_STYLES = 8
CIRCLE = 0
LETTER = 6.3  # width of a letter in the size used on axes
TOP, BOTTOM = 30, 42
MARKERS = (
    "M{0} 0a{0} {0} 0 1 0 -{1} 0a{0} {0} 0 1 0 {1} 0z",  # circle
    "M-{2} -{2}h{3}v{3}h-{3}z",  # square
    "M0 -{4}L{4} {2}H-{4}z",  # triangle
    "M0 -{4}L{4} 0L0 {4}L-{4} 0z",  # diamond
    "M0 {4}L{4} -{2}H-{4}z",  # triangle on its tip
    "M-{4} -{5}h{6}v{7}h-{6}z",  # bar
    "M-{5} -{4}h{7}v{6}h-{7}z",  # pillar
    "M0 -{4}L{4} -{5}L{2} {4}H-{2}L-{4} -{5}z",  # pentagon
)


def number(value: float, digits: int = 3) -> str:
    """Formatted with `digits` significant digits and a true minus sign."""
    return f"{value:.{digits}g}".replace("-", "−")


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: tuple[float, ...]

    @property
    def texts(self) -> list[str]:
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = next(d for d in range(12) if abs(round(step, d) - step) < 1e-6 * step)
        return [f"{tick:.{decimals}f}".replace("-", "−") for tick in self.ticks]


def axis(label: str, values: Iterable[float], most: int = 5) -> Axis:
    """An axis from a round number below the values to a round number above them."""
    known = list(values)
    low, high = min(known), max(known)
    if high - low < 1e-9 * max(1.0, abs(high)):
        room = abs(high) / 20 if abs(high) > 1e-3 else 0.5
        low, high = low - room, high + room
    step = round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(place * step for place in range(first, last + 1))
    return Axis(label, ticks[0], ticks[-1], ticks)


def span(label: str, low: float, high: float, most: int = 5) -> Axis:
    """Exactly from low to high, with round ticks between."""
    step = max(round_step((high - low) / most or 1.0), 1.0 if high - low >= 2 else 0.0)
    ticks = tuple(place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1))
    return Axis(label, low, high, ticks)


def counts(label: str, highest: int) -> Axis:
    """Whole numbers from 1 to `highest`."""
    step = math.ceil(highest / 10)
    return Axis(label, 1, highest, tuple(float(place) for place in range(1, highest + 1, step)))


def unit(label: str, most: int = 5) -> Axis:
    return span(label, 0, 1, most)


def round_step(least: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= least * (1 - 1e-9))


def style(place: int | None) -> str:
    """The classes of an ensemble's style; None: of no particular ensemble."""
    if place is None:
        return "plain"
    colour, turn = place % NUM_STYLES, place // NUM_STYLES  # a colour that is used again gets other strokes
    return f"s{colour}{('', ' again', ' third')[min(turn, 2)]}"


def width_of(text: str) -> float:
    return LETTER * len(text)


class Panel:
    """A chart with two axes: takes data coordinates, and returns SVG with a text for readers who cannot see it.

    Lines and areas are clipped at the axes; marks and labels are not.
    """

    def __init__(
        self, x: Axis, y: Axis, width: int = 360, height: int = 236, right: float = 14, left: float | None = None
    ):
        self.x_axis, self.y_axis, self.width, self.height = x, y, width, height
        self.left = 12 + max(map(width_of, y.texts), default=0) if left is None else left
        self.plot_width, self.plot_height = width - self.left - right, height - TOP - BOTTOM
        self.inside: list[str] = []
        self.above: list[str] = []

    def x(self, value: float) -> float:
        axis = self.x_axis
        return self.left + self.plot_width * (value - axis.low) / (axis.high - axis.low or 1)

    def y(self, value: float) -> float:
        axis = self.y_axis
        return TOP + self.plot_height * (1 - (value - axis.low) / (axis.high - axis.low))

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def line(self, points: Iterable[tuple[float, float]], place: int, kind: str = "") -> None:
        self.inside.append(f'<path class="line {kind} {style(place)}" d="{self.path(points)}"/>')

    def area(self, outline: Iterable[tuple[float, float]], place: int, kind: str = "band") -> None:
        self.inside.append(f'<path class="{kind} {style(place)}" d="{self.path(outline)}z"/>')

    def reference(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.inside.append(f'<path class="reference" d="{self.path([start, end])}"/>')

    def mark(
        self, x: float, y: float, place: int, tip: str, size: float = 4, hollow: bool = False, shape: int | None = None
    ) -> None:
        """`shape`: a marker other than the ensemble's own."""
        where = f'transform="translate({self.x(x):.1f} {self.y(y):.1f})"'
        kind, outline = "hollow" if hollow else "mark", marker(place if shape is None else shape, size)
        self.above.append(
            f'<path class="{kind} {style(place)}" {where} d="{outline}"><title>{escape(tip)}</title></path>'
        )

    def write(self, x: float, y: float, text: str, kind: str = "label", anchor: str = "start") -> None:
        """At picture coordinates, not data coordinates."""
        self.above.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def draw(self, seen: str) -> str:
        """The picture; `seen` says what a reader would see in it."""
        plot = f'x="{self.left:.1f}" y="{TOP}" width="{self.plot_width:.1f}" height="{self.plot_height}"'
        view = f'viewBox="{self.left:.1f} {TOP} {self.plot_width:.1f} {self.plot_height}"'
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(seen)}">'
            f"{self.axes()}<svg {plot} {view}>{''.join(self.inside)}</svg>{''.join(self.above)}</svg>"
        )

    def axes(self) -> str:
        right, floor = self.left + self.plot_width, TOP + self.plot_height
        parts = [f'<text class="axis" x="{min(self.left, 4):.1f}" y="14">{escape(self.y_axis.label)}</text>']
        for tick, text in zip(self.y_axis.ticks, self.y_axis.texts, strict=True):
            height = self.y(tick)
            parts.append(f'<path class="gridline" d="M{self.left:.1f} {height:.1f}H{right:.1f}"/>')
            parts.append(f'<text class="tick end" x="{self.left - 6:.1f}" y="{height + 4:.1f}">{text}</text>')
        for tick, text in zip(self.x_axis.ticks, self.x_axis.texts, strict=True):
            if not self.y_axis.ticks:
                parts.append(f'<path class="gridline" d="M{self.x(tick):.1f} {TOP}V{floor}"/>')
            parts.append(f'<text class="tick middle" x="{self.x(tick):.1f}" y="{floor + 16}">{text}</text>')
        middle = self.left + self.plot_width / 2
        parts.append(f'<path class="base" d="M{self.left:.1f} {floor}H{right:.1f}"/>')
        parts.append(f'<text class="axis middle" x="{middle:.1f}" y="{floor + 34}">{escape(self.x_axis.label)}</text>')
        return "".join(parts)


def marker(place: int, size: float) -> str:
    sizes = (size, 2 * size, 0.85 * size, 1.7 * size, 1.2 * size, 0.5 * size, 2.4 * size, size)
    turn = 3 * (place // NUM_STYLES)  # a colour that is used again gets another marker
    return MARKERS[(place + turn) % NUM_STYLES].format(*(f"{value:.3g}" for value in sizes))


def legend_key(place: int | None, hollow: bool = False, line: str = "") -> str:
    """The line and marker of an ensemble, for a legend; `line` is a kind of line."""
    kind, shape = "hollow" if hollow else "mark", marker(place or 0, 4)
    return (
        f'<svg class="key {style(place)}" viewBox="0 0 28 14" width="28" height="14" aria-hidden="true">'
        f'<path class="line {line}" d="M1 7H27"/><path class="{kind}" transform="translate(14 7)" d="{shape}"/></svg>'
    )
