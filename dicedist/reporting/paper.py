"""The figures printed in the paper, from conf/paper.csv: one row for each figure of a cell.

table    the table of the paper, by our name for it
cell     a row of conf/cells.csv
measure  its name in evaluation.json, like ood.isun.max_softmax.auroc; or cost.parameters, cost.gflops
unit     in which the paper prints the measure
paper    the figure, like 77.92 +- 0.08; - for a cell of a table for which the paper has no figure
"""

import csv
from dataclasses import dataclass
from functools import cache

from dicedist.config import Config, Scope, changed_keys, compose_config, flatten
from dicedist.config.compose import CONF
from dicedist.reporting.records import Pooled

RUNS = 3  # per mean in the paper


@dataclass(frozen=True)
class Figure:
    table: str
    cell: str
    measure: str
    unit: float
    paper: str

    @property
    def pooled(self) -> Pooled | None:
        """Return mean and deviation in the paper's unit."""
        if self.paper == "-":
            return None
        mean, _, deviation = self.paper.partition(" +- ")
        return Pooled(float(mean), float(deviation) if deviation else None, RUNS)


@cache
def find_figures() -> list[Figure]:
    """Return all figures of conf/paper.csv, sorted by cell."""
    with (CONF / "paper.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["cell"])
    return [Figure(row["table"], row["cell"], row["measure"], float(row["unit"]), row["paper"]) for row in rows]


def accuracy(config: Config) -> Pooled | None:
    """Return the paper's accuracy of an ensemble with exactly these settings; None if the paper has no such cell."""
    name = f"{config.data.name}/{config.network.name}-{config.structure}{config.ensemble.size}-{config.method.name}"
    for figure in find_figures():
        of_this = figure.table == config.data.name and figure.cell.startswith(name)
        if of_this and figure.pooled and not differences(figure.cell, config):
            return figure.pooled.times(figure.unit)
    return None


def differences(cell: str, config: Config) -> list[str]:
    return changed_keys(settings_of(cell), flatten(config), {Scope.RESULT, Scope.LENGTH})


@cache
def settings_of(cell: str) -> dict[str, object]:
    return flatten(compose_config([f"experiment={cell}"]))
