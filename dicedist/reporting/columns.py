"""The columns that ensembles are compared by: a measure, and where an evaluation.json has it."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, OOD, Measure
from dicedist.reporting.records import Group, Pooled, dig

BY_NAME = {measure.name: measure for measure in (*ENSEMBLE, *DIVERSITY, *OOD)}
CLEAN = "0"  # the severity of the test images as they are
Evaluation = Mapping[str, Any]  # an evaluation.json
Reading = Callable[[Evaluation], float | None]


@dataclass(frozen=True)
class Column:
    title: str
    measure: Measure
    read: Reading
    when: str = ""  # before or after temperature scaling
    over: str = ""  # the common title of neighboring columns

    @property
    def heading(self) -> str:
        unit = f", {self.measure.unit}" if self.measure.unit else ""
        return f"{self.title} {self.when}".rstrip() + unit

    def pooled(self, group: Group) -> Pooled | None:
        return group.pooled(self.read)


def reading(*path: str) -> Reading:
    return lambda evaluation: dig(evaluation, path)


def auroc_reading(score: str, sets: Sequence[str]) -> Reading:
    """The mean AUROC over the OOD sets, where the score was measured on all of them."""

    def read(evaluation: Evaluation) -> float | None:
        found = [evaluation["ood"][name].get(score) for name in sets]
        return statistics.fmean(scores["auroc"] for scores in found) if found and all(found) else None

    return read


def shift_reading(name: str) -> Reading:
    """The mean of a measure over the severities of the one shift that was measured."""

    def read(evaluation: Evaluation) -> float | None:
        shifts = list(evaluation.get("shift", {}).values())
        if len(shifts) != 1:
            return None
        found = [means.get(name) for severity, means in shifts[0]["mean"].items() if severity != CLEAN]
        return statistics.fmean(found) if found and None not in found else None

    return read


def common_sets(groups: Iterable[Group]) -> list[str]:
    """OOD sets that every evaluated run has, so that means over them are comparable."""
    every = [set(evaluation.get("ood", {})) for group in groups for evaluation in group.evaluations]
    return sorted(set.intersection(*every)) if every else []
