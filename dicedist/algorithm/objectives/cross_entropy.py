"""Cross-entropy of each member: independent training."""

from torch import Tensor

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import ScheduleValues


class Term(Objective):
    mixes = True

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        return {"cross_entropy": view.targets.cross_entropy(view.own.logits_BK)}
