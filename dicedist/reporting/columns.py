"""Columns of comparison tables: a measure, and how to read it from evaluation.json."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, OOD, Measure
from dicedist.reporting.records import Group, Pooled, dig

BY_NAME = {measure.name: measure for measure in (*ENSEMBLE, *DIVERSITY, *OOD)}
CLEAN = "0"  # severity of the original test images
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
    """Return a reading of the mean AUROC over OOD sets; None unless the score was measured on all of them."""

    def read(evaluation: Evaluation) -> float | None:
        found = [evaluation["ood"][name].get(score) for name in sets]
        return statistics.fmean(scores["auroc"] for scores in found) if found and all(found) else None

    return read


def shift_reading(name: str) -> Reading:
    """Return a reading of the mean of a measure over severities, for runs with exactly one shift."""

    def read(evaluation: Evaluation) -> float | None:
        shifts = list(evaluation.get("shift", {}).values())
        if len(shifts) != 1:
            return None
        found = [means.get(name) for severity, means in shifts[0]["mean"].items() if severity != CLEAN]
        return statistics.fmean(found) if found and None not in found else None

    return read


def common_sets(groups: Iterable[Group]) -> list[str]:
    """Return the OOD sets of every evaluated run, so that means over them are comparable."""
    every = [set(evaluation.get("ood", {})) for group in groups for evaluation in group.evaluations]
    return sorted(set.intersection(*every)) if every else []
