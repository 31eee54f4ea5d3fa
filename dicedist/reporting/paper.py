"""The paper's own figures. Their only source is the head of each cell's file in conf/experiment/:

# paper: 77.92 +- 0.08                    accuracy of the ensemble, in the table named after the cell's folder
# paper: 77.92 (size)                     the same, in another table
# paper: 77.32 (codistillation, student)  accuracy of another predictor: ensemble, members (their mean), student
"""

import re
from dataclasses import dataclass
from functools import cache

from dicedist.config import Config, Scope, changed_keys, choices_of, compose_config, flatten
from dicedist.config.compose import CONF
from dicedist.reporting.records import Pooled

FIGURE = re.compile(r"^# paper: ([\d.]+)(?: \+- ([\d.]+))?(?: \((\w+)(?:, (\w+))?\))?$", re.MULTILINE)
EXPERIMENTS = "experiment"
RUNS = 3  # behind each mean of the paper


@dataclass(frozen=True)
class Figure:
    table: str
    predictor: str  # whose accuracy: ensemble, members (their mean), student
    value: str | None
    deviation: str | None

    def __str__(self) -> str:
        return "-" if self.value is None else self.value + (f" +- {self.deviation}" if self.deviation else "")


@dataclass(frozen=True)
class Cell:
    name: str  # folder/file
    figures: tuple[Figure, ...]


def find_cells() -> list[Cell]:
    return [read_cell(name) for name in choices_of(EXPERIMENTS) if "/" in name]


def read_cell(name: str) -> Cell:
    """A cell without any figure belongs to the table named after its folder."""
    folder = name.partition("/")[0]
    lines = FIGURE.findall((CONF / EXPERIMENTS / f"{name}.yaml").read_text()) or [("", "", "", "")]
    return Cell(
        name,
        tuple(
            Figure(where or folder, predictor or "ensemble", value or None, deviation or None)
            for value, deviation, where, predictor in lines
        ),
    )


def accuracy(config: Config) -> Pooled | None:
    """What the paper reports for an ensemble with exactly these settings; None if it has no such cell."""
    data, size = config.data.name, config.num_members
    name = f"{data}/{config.network.name}-{config.structure}{size}-{config.method.name}"
    for candidate in choices_of(EXPERIMENTS):
        if candidate.startswith(name) and not changed_keys(
            settings_of(candidate), flatten(config), {Scope.RESULT, Scope.LENGTH}
        ):
            figures = [figure for figure in read_cell(candidate).figures if figure.table == data]
            if figures and figures[0].value:
                deviation = figures[0].deviation
                return Pooled(float(figures[0].value) / 100, float(deviation) / 100 if deviation else None, RUNS)
    return None


@cache
def settings_of(cell: str) -> dict[str, object]:
    return flatten(compose_config([f"experiment={cell}"]))
