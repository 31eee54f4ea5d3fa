"""Draw the figures of docs/gallery.md from a run: docs/images/report-NAME.svg and docs/images/reliability.svg

./launch/quickstart
python docs/draw_gallery.py runs/quickstart
"""

import sys
from pathlib import Path

import dicedist
from dicedist.reporting import calibration
from dicedist.reporting.records import read_groups

IMAGES = Path(__file__).parent / "images"
FIGURES = {  # name of the file -> name of the figure
    "accuracy": "accuracy-of-the-ensemble",
    "redundancy": "redundancy-held-out",
    "ratio-error": "ratio-error",
    "size": "accuracy-against-ensemble-size",
    "classes": "dice",
    "coverage": "dice-ensemble-and-members",
    "w": "calibration-of-w",
}


def main() -> None:
    run = dicedist.Run.open(sys.argv[1])
    figures = run.figures()
    for name, figure in FIGURES.items():
        (IMAGES / f"report-{name}.svg").write_text(figures[figure].svg)
    # The section of classes has a figure with the same name, "dice", so the diagram comes from its own section.
    (diagram,) = calibration.section(read_groups([run])).figures
    (IMAGES / "reliability.svg").write_text(diagram.svg)


if __name__ == "__main__":
    main()
