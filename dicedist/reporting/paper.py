"""The paper's own accuracies (tables 1 and 2: Top-1 %, mean and deviation of 3 runs of 300 epochs), to compare with."""

from dicedist.reporting.labels import Settings
from dicedist.reporting.records import Pooled

EPOCHS = 300
CELLS = {
    "cifar100": [
        ("resnet32", "3-branch"), ("resnet32", "4-branch"), ("resnet32", "5-branch"), ("resnet32", "4-net"),
        ("resnet110", "3-branch"), ("resnet110", "4-branch"),
        ("wrn28_2", "3-branch"), ("wrn28_2", "4-branch"), ("wrn28_2", "3-net"),
    ],
    "cifar10": [("resnet32", "4-branch"), ("resnet110", "3-branch")],
}  # fmt: skip
ROWS = {
    "cifar100": {
        "ind": "76.28±0.12 76.78±0.19 77.24±0.25 77.38±0.12 80.54±0.09 80.89±0.31 78.83±0.12 79.10±0.08 80.01±0.15",
        "one": "75.17±0.35 75.13±0.25 75.25±0.22 76.25±0.32 78.97±0.24 79.86±0.25 78.38±0.45 78.47±0.32 77.53±0.36",
        "okddip": "75.37±0.32 76.85±0.25 76.95±0.18 77.27±0.31 79.07±0.27 80.46±0.35 79.01±0.19 79.32±0.17 80.02±0.14",
        "adp": "76.37±0.11 77.21±0.21 77.67±0.25 77.51±0.25 80.73±0.38 81.40±0.27 79.21±0.19 79.71±0.18 80.01±0.17",
        "ib": "76.01±0.12 76.93±0.24 77.22±0.19 77.72±0.12 80.43±0.34 81.12±0.19 79.19±0.35 79.15±0.12 80.15±0.13",
        "ceb": "76.36±0.06 76.98±0.18 77.35±0.14 77.64±0.15 81.08±0.12 81.17±0.16 78.92±0.08 79.20±0.13 80.38±0.18",
        "ibr": "76.68±0.13 77.25±0.13 77.77±0.21 77.84±0.12 81.34±0.21 81.38±0.08 79.33±0.15 79.90±0.10 80.22±0.10",
        "cebr": "76.72±0.08 77.30±0.12 77.81±0.10 77.82±0.11 81.52±0.11 81.55±0.33 79.25±0.15 79.98±0.07 80.35±0.15",
        "dice": "76.89±0.09 77.51±0.17 78.08±0.18 77.92±0.08 81.67±0.14 81.93±0.13 79.59±0.13 80.05±0.11 80.55±0.12",
    },
    "cifar10": {
        "ind": "94.75±0.08 95.62±0.06",
        "one": "94.41±0.05 95.25±0.08",
        "okddip": "94.86±0.08 95.21±0.09",
        "adp": "94.92±0.04 95.43±0.12",
        "ib": "94.76±0.12 94.54±0.07",
        "ceb": "94.93±0.11 94.65±0.05",
        "ibr": "94.91±0.14 95.68±0.05",
        "cebr": "94.94±0.12 95.67±0.06",
        "dice": "95.01±0.09 95.74±0.08",
    },
}


def accuracy(settings: Settings) -> Pooled | None:
    """What the paper reports for this ensemble, in %; None where its tables have no such cell."""
    data, cell = settings["data.name"], (settings["network.name"], settings["ensemble"])
    row = ROWS.get(data, {}).get(settings["method.name"])
    if row is None or cell not in CELLS[data] or settings["epochs"] != EPOCHS or settings["data.train_limit"]:
        return None
    mean, deviation = row.split()[CELLS[data].index(cell)].split("±")
    return Pooled(float(mean), float(deviation), 3)
