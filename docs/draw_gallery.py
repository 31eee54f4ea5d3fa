"""Draw the figures of docs/gallery.md in docs/images/: report-NAME.svg, reliability.svg and tradeoff.svg

./launch/quickstart
dicedist sweep --name compare --nproc 1 method=ind,ceb,dice seed=0,1,2 experiment=digits ensemble.size=4 tracking=none
python docs/draw_gallery.py runs/quickstart runs/compare/method-*/
"""

import sys
from pathlib import Path

import dicedist
from dicedist.reporting.page import figures

IMAGES = Path(__file__).parent / "images"
FIGURES = {  # name of the file -> name of the figure
    "report-accuracy": "accuracy-of-the-ensemble",
    "report-redundancy": "redundancy-held-out",
    "report-ratio-error": "ratio-error",
    "report-size": "accuracy-against-ensemble-size",
    "report-classes": "classes-dice",
    "report-coverage": "dice-ensemble-and-members",
    "report-w": "calibration-of-w",
    "reliability": "reliability-dice",
}


def main() -> None:
    run, *compared = map(dicedist.Run.open, sys.argv[1:])
    found = run.figures()
    for name, figure in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(found[figure].svg)
    if compared:
        (IMAGES / "tradeoff.svg").write_text(figures(compared)["diversity-against-individual-accuracy"].svg)


if __name__ == "__main__":
    main()
