"""Draw the figures of docs/gallery.md from a run: docs/images/report-NAME.svg and docs/images/reliability.svg

./launch/quickstart
python docs/draw_gallery.py runs/quickstart
"""

import sys
from pathlib import Path

import dicedist

IMAGES = Path(__file__).parent / "images"
FIGURES = {  # name of the file -> name of the figure
    "accuracy": "accuracy-of-the-ensemble",
    "redundancy": "redundancy-held-out",
    "ratio-error": "ratio-error",
    "size": "accuracy-against-ensemble-size",
    "classes": "classes-dice",
    "coverage": "dice-ensemble-and-members",
    "w": "calibration-of-w",
}


def main() -> None:
    figures = dicedist.Run.open(sys.argv[1]).figures()
    for name, figure in FIGURES.items():
        (IMAGES / f"report-{name}.svg").write_text(figures[figure].svg)
    (IMAGES / "reliability.svg").write_text(figures["reliability-dice"].svg)


if __name__ == "__main__":
    main()
