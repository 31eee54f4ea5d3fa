"""Places labels apart from each other and clear of what is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.reporting.svg import TOP, Panel, width_of

LINE = 12.0  # height of a line of text


def apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves labels as little as needed to keep them `gap` apart and, if they fit, between low and high."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    moved = list(heights)
    for before, after in zip(order, order[1:], strict=False):
        moved[after] = max(moved[after], moved[before] + gap)
    ceiling = high
    for place in reversed(order):
        moved[place] = min(moved[place], ceiling)
        ceiling = moved[place] - gap
    floor = low
    for place in order:
        moved[place] = max(moved[place], floor)
        floor = moved[place] + gap
    return moved


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


def around(x: float, y: float, radius: float) -> Box:
    return Box(x - radius, y - radius, x + radius, y + radius)


@dataclass(frozen=True)
class Place:
    """Where the text of a label is anchored, and what it covers."""

    x: float
    y: float
    anchor: str
    width: float

    @property
    def box(self) -> Box:
        left = self.x - self.width * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        return Box(left, self.y - LINE + 2, left + self.width, self.y + 2)


def clear_place(x: float, y: float, text: str, panel: Panel, taken: Sequence[Box]) -> Place:
    """The place around a point where a label hides least and stays inside the plot."""
    width = 1.1 * width_of(text)
    plot = Box(panel.left, TOP, panel.left + panel.plot_width, TOP + panel.plot_height)
    beside = [Place(x + 9, y + 4, "start", width), Place(x - 9, y + 4, "end", width)]
    above_and_below = [
        Place(x + shift, y + drop, anchor, width)
        for drop in (-9, 17, -22, 30)
        for anchor, shift in (("start", 9), ("end", -9), ("middle", 0))
    ]

    def cost(place: Place) -> float:
        outside = width * LINE - place.box.shared(plot)
        return 3 * outside + sum(place.box.shared(other) for other in taken)

    return min(beside + above_and_below, key=cost)
