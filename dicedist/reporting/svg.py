"""Figures as SVG: axes, a panel to draw on, and markers that distinguish ensembles without colors.

Colors come from the style sheet: the class s0, s1, ... sets `currentColor`, so figures follow the light or dark theme.
All markup of figures and pages is in templates/, which escape every string.
"""

import base64
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

NUM_STYLES = 8
CIRCLE = 0
LETTER = 6.3  # width of a letter in the size used on axes
BOLD = 8.2  # of a bold letter, in wide fonts such as DejaVu Sans
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


def style(place: int | None) -> str:
    """Return the CSS classes of an ensemble's style; None: no particular ensemble."""
    if place is None:
        return "plain"
    color, turn = place % NUM_STYLES, place // NUM_STYLES  # a repeated color gets other strokes
    return f"s{color}{('', ' again', ' third')[min(turn, 2)]}"


def marker(place: int | None, size: float) -> str:
    place = place or 0
    sizes = (size, 2 * size, 0.85 * size, 1.7 * size, 1.2 * size, 0.5 * size, 2.4 * size, size)
    turn = 3 * (place // NUM_STYLES)  # a repeated color gets another marker
    return MARKERS[(place + turn) % NUM_STYLES].format(*(f"{value:.3g}" for value in sizes))


TEMPLATES = Environment(
    loader=PackageLoader("dicedist.reporting"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
TEMPLATES.globals |= {"style": style, "marker": marker}


def render(template: str, **values: Any) -> Markup:
    """Render a template with these values, as markup that other templates may include."""
    return Markup(TEMPLATES.get_template(template).render(values))


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, for pages and notebooks. `svg` is the text of a standalone file."""

    title: str
    seen: str  # the drawing in words
    width: int
    height: int
    drawing: Markup = field(repr=False)
    note: str = ""

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", self.title).strip("-").lower()

    @property
    def svg(self) -> str:
        return str(render("figure.svg", figure=self))

    def _repr_html_(self) -> str:
        """Return an image, because inline the figure's style would change the notebook."""
        return render("image.html", base64=base64.b64encode(self.svg.encode()).decode(), seen=self.seen)


def number(value: float, digits: int = 3) -> str:
    """Format with `digits` significant digits and a true minus sign."""
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
    """Return an axis from a round number below the values to a round number above them."""
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
    """Return an axis exactly from low to high, with round ticks between."""
    step = max(round_step((high - low) / most or 1.0), 1.0 if high - low >= 2 else 0.0)
    ticks = tuple(place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1))
    return Axis(label, low, high, ticks)


def counts(label: str, highest: int) -> Axis:
    """Return an axis of whole numbers from 1 to `highest`."""
    step = math.ceil(highest / 10)
    return Axis(label, 1, highest, tuple(float(place) for place in range(1, highest + 1, step)))


def round_step(least: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= least * (1 - 1e-9))


def width_of(text: str, bold: bool = False) -> float:
    return (BOLD if bold else LETTER) * len(text)


class Shape(NamedTuple):
    kind: str  # classes of the style sheet
    outline: str
    x: float = 0
    y: float = 0
    tip: str = ""


class Text(NamedTuple):
    kind: str
    x: float
    y: float
    text: str
    anchor: str


class Panel:
    """A chart with two axes. Methods draw in data coordinates, and `figure` returns the result.

    Lines and areas are clipped at the axes; marks and texts are not.
    """

    top = TOP

    def __init__(
        self, x: Axis, y: Axis, width: int = 360, height: int = 236, right: float = 14, left: float | None = None
    ):
        self.x_axis, self.y_axis, self.width, self.height = x, y, width, height
        self.left = 12 + max(map(width_of, y.texts), default=0) if left is None else left
        self.plot_width, self.plot_height = width - self.left - right, height - TOP - BOTTOM
        self.right, self.floor = self.left + self.plot_width, TOP + self.plot_height
        self.lines: list[Shape] = []
        self.texts: list[Text] = []
        self.marks: list[Shape] = []

    def x(self, value: float) -> float:
        axis = self.x_axis
        return self.left + self.plot_width * (value - axis.low) / (axis.high - axis.low or 1)

    def y(self, value: float) -> float:
        axis = self.y_axis
        return TOP + self.plot_height * (1 - (value - axis.low) / (axis.high - axis.low))

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def line(self, points: Iterable[tuple[float, float]], place: int, kind: str = "") -> None:
        self.lines.append(Shape(f"line {kind} {style(place)}", self.path(points)))

    def area(self, outline: Iterable[tuple[float, float]], place: int, kind: str = "band") -> None:
        self.lines.append(Shape(f"{kind} {style(place)}", f"{self.path(outline)}z"))

    def reference(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.lines.append(Shape("reference", self.path([start, end])))

    def mark(
        self, x: float, y: float, place: int, tip: str, size: float = 4, hollow: bool = False, shape: int | None = None
    ) -> None:
        """Draw a marker. shape: a marker other than the ensemble's own."""
        kind, outline = "hollow" if hollow else "mark", marker(place if shape is None else shape, size)
        self.marks.append(Shape(f"{kind} {style(place)}", outline, self.x(x), self.y(y), tip))

    def write(self, x: float, y: float, text: str, kind: str = "label", anchor: str = "start") -> None:
        """Write text at picture coordinates, not data coordinates. Marks are drawn above it."""
        self.texts.append(Text(kind, x, y, text, anchor))

    def figure(self, title: str, seen: str, note: str = "") -> Figure:
        """Return the figure. seen: the drawing in words, for screen readers."""
        return Figure(title, seen, self.width, self.height, render("panel.svg", panel=self), note)
