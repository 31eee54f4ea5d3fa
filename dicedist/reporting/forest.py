"""Forest plots: means and their intervals as rows of bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicedist.metrics.statistics import Interval
from dicedist.reporting import svg
from dicedist.reporting.svg import BOTTOM, TOP, Axis, Figure, Panel, width_of

ROW, BAR = 12, 10  # heights: of the space around the bars of a row, and of each bar in it


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


def forest(title: str, label: str, rows: Mapping[str, Sequence[Bar]], zero: bool = False, width: int = 360) -> Figure:
    """Draw rows by name, from top to bottom. zero: draw a line at 0, for differences."""
    bars = [bar for row in rows.values() for bar in row]
    top = height = ROW * len(rows) + BAR * len(bars)
    across = svg.axis(label, [*(end for bar in bars for end in bar.ends), *([0.0] if zero else [])], 4)
    left = 16 + max(width_of(name, bold=True) for name in rows)
    panel = Panel(across, Axis("", 0, height, ()), width, height + TOP + BOTTOM, right=18, left=left)
    if zero:
        panel.reference((0, 0), (0, height))
    for name, row in rows.items():
        panel.write(left - 8, panel.y(top - (ROW + BAR * len(row)) / 2) + 4, name, anchor="end")
        for place, bar in enumerate(row):
            y = top - (ROW + BAR) / 2 - place * BAR
            panel.line([(end, y) for end in bar.ends], bar.style, "thin")
            panel.mark(bar.interval.mean, y, bar.style, bar.tip, 3.5, bar.hollow)
        top -= ROW + BAR * len(row)
    return panel.figure(title, f"{label}: {'; '.join(bar.tip for bar in bars)}.")
