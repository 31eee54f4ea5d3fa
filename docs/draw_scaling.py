"""Draws docs/images/scaling.svg: the time of a step against members, as `bench scaling` measured and computed it.

python -m dicedist.bench scaling
python -m dicedist.bench scaling --simulate simulate.nodes=1
python docs/draw_scaling.py bench-scaling.json bench-simulation.json
"""

import json
import sys
from pathlib import Path

from dicedist.reporting import svg

OUTPUT = Path(__file__).parent / "images" / "scaling.svg"
ALONE, DIVIDED, COMPUTED = 1, 2, 0  # styles: w on one rank, w on as many as hide it, the latter computed


def times(rows: list[dict], column: str, alone: bool) -> list[tuple[float, float]]:
    """Members and the time of a step to that of the first row: w on one rank, or on the most that was measured."""
    chosen = {row["members"]: row for row in rows if not alone or row["ranks of w"] == 1}
    return [(members, row[column] / rows[0][column]) for members, row in chosen.items()]


def main() -> None:
    measured, computed = (json.loads(Path(name).read_text())["rows"] for name in sys.argv[1:])
    lines = {
        ALONE: ("w on one rank", times(measured, "step, s", alone=True)),
        DIVIDED: ("w on as many as hide it", times(measured, "step, s", alone=False)),
        COMPUTED: ("the same, computed", times(computed, "step, ms", alone=False)),
    }
    members = tuple(float(x) for x, _ in lines[DIVIDED][1])
    x = svg.Axis("members, each with a device of its own", members[0], members[-1], members)
    panel = svg.Panel(x, svg.span("step, times that of 4 members", 0, 8))
    for style, (_, dots) in lines.items():
        panel.line(dots, style)
        for place, height in dots:
            if height <= 8:
                panel.mark(place, height, style, f"{place:.0f} members: {height:.2f}")
    said = "; ".join(f"{name}: {', '.join(f'{x:.0f} {y:.2f}' for x, y in dots)}" for name, dots in lines.values())
    OUTPUT.write_text(panel.figure("scaling", said).svg)


if __name__ == "__main__":
    main()
