"""The paper's own figures. Accuracies stand in the head of each cell's file in conf/experiment/:

# paper: 77.92 +- 0.08                    accuracy of the ensemble, in the table named after the cell's folder
# paper: 77.92 (size)                     the same, in another table
# paper: 77.32 (codistillation, student)  of another predictor: ensemble, members (their mean), student, fused
# paper: - (terms)                        a cell of a table, for which the paper has no figure

and all other measures in conf/paper.csv: of a cell, the name of the measure in evaluation.json, the unit in which the
paper prints it.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from dicedist.config import Config, Scope, changed_keys, choices_of, compose_config, flatten
from dicedist.config.compose import CONF
from dicedist.reporting.records import Pooled

FIGURE = re.compile(r"^# paper: ([\d.]+|-)(?: \+- ([\d.]+))?(?: \((\w+)(?:, (\w+))?\))?$", re.MULTILINE)
EXPERIMENTS = "experiment"
TABLES = CONF / "paper.csv"
RUNS = 3  # behind each mean of the paper


@dataclass(frozen=True)
class Figure:
    table: str
    measure: str  # as in evaluation.json, like ood.isun.max_softmax.auroc; or cost.parameters, cost.gflops
    value: str | None
    deviation: str | None
    unit: float = 0.01

    def __str__(self) -> str:
        return "-" if self.value is None else self.value + (f" +- {self.deviation}" if self.deviation else "")

    @property
    def pooled(self) -> Pooled | None:
        """In the paper's unit."""
        if self.value is None:
            return None
        return Pooled(float(self.value), float(self.deviation) if self.deviation else None, RUNS)


@dataclass(frozen=True)
class Cell:
    name: str  # folder/file
    figures: tuple[Figure, ...]


def find_cells() -> list[Cell]:
    others = read_tables()
    return [read_cell(name, others.get(name, [])) for name in choices_of(EXPERIMENTS) if "/" in name]


def read_tables() -> dict[str, list[Figure]]:
    """Figures of conf/paper.csv, by cell."""
    found: dict[str, list[Figure]] = {}
    with TABLES.open(newline="") as file:
        for line in csv.DictReader(file):
            value, _, deviation = line["paper"].partition(" +- ")
            figure = Figure(line["table"], line["measure"], value, deviation or None, float(line["unit"]))
            found.setdefault(line["cell"], []).append(figure)
    return found


def read_cell(name: str, others: Sequence[Figure] = ()) -> Cell:
    """A cell without any figure belongs to the table named after its folder."""
    folder = name.partition("/")[0]
    lines = FIGURE.findall((CONF / EXPERIMENTS / f"{name}.yaml").read_text()) or [("", "", "", "")]
    accuracies = (
        Figure(
            where or folder,
            f"{predictor or 'ensemble'}.accuracy",
            None if value in ("", "-") else value,
            deviation or None,
        )
        for value, deviation, where, predictor in lines
    )
    return Cell(name, (*accuracies, *others))


def accuracy(config: Config) -> Pooled | None:
    """What the paper reports for an ensemble with exactly these settings; None if it has no such cell."""
    data, size = config.data.name, config.ensemble.size
    name = f"{data}/{config.network.name}-{config.structure}{size}-{config.method.name}"
    for candidate in choices_of(EXPERIMENTS):
        if candidate.startswith(name) and not changed_keys(
            settings_of(candidate), flatten(config), {Scope.RESULT, Scope.LENGTH}
        ):
            figures = [figure for figure in read_cell(candidate).figures if figure.table == data]
            if figures and figures[0].value:
                found = figures[0].pooled
                return found.times(figures[0].unit) if found else None
    return None


@cache
def settings_of(cell: str) -> dict[str, object]:
    return flatten(compose_config([f"experiment={cell}"]))
