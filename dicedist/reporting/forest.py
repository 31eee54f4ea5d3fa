"""Means and their intervals as rows of bars, to be compared with each other or with zero."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.metrics.statistics import Interval
from dicedist.reporting import svg
from dicedist.reporting.svg import BOTTOM, TOP, Axis, Panel, width_of

ROW, BAR = 12, 10  # heights: of the room around the bars of a row, and of each bar in it


@dataclass(frozen=True)
class Bar:
    interval: Interval
    style: int
    tip: str
    hollow: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        lower, upper = self.interval.lower, self.interval.upper
        return (self.interval.mean,) * 2 if lower is None or upper is None else (lower, upper)


@dataclass(frozen=True)
class Row:
    name: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return ROW + BAR * len(self.bars)


def forest(label: str, rows: Sequence[Row], zero: bool = False, width: int = 360) -> str:
    """From top to bottom; `zero` draws a line there, which the bars of differences are to be compared with."""
    bars = [bar for row in rows for bar in row.bars]
    height = sum(row.height for row in rows)
    across = svg.axis(label, [*(end for bar in bars for end in bar.ends), *([0.0] if zero else [])], 4)
    left = 16 + 1.1 * max(width_of(row.name) for row in rows)  # names are bold
    panel = Panel(across, Axis("", 0, height, ()), width, height + TOP + BOTTOM, right=18, left=left)
    if zero:
        panel.reference((0, 0), (0, height))
    top = height
    for row in rows:
        panel.write(left - 8, panel.y(top - row.height / 2) + 4, row.name, anchor="end")
        for place, bar in enumerate(row.bars):
            y = top - (ROW + BAR) / 2 - place * BAR
            panel.line([(end, y) for end in bar.ends], bar.style, "thin")
            panel.mark(bar.interval.mean, y, bar.style, bar.tip, 3.5, bar.hollow)
        top -= row.height
    return panel.draw(f"{label}: {'; '.join(bar.tip for bar in bars)}.")
