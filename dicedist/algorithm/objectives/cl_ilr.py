"""Collaborative learning with intermediate-level representation sharing (Song and Chai, 2018), for branches.

loss_i = CE_i + r KD(z_i <- mean of the others' logits), with peers held constant; the gradient is divided by M
where the branches leave the trunk.
"""

from torch import Tensor

from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.schedules import Moment


class Term(Distillation):
    follows = ("ramp_up",)
    sends = ("logits",)
    averages_trunk = True

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        others = [member for member in range(view.num_members) if member != view.index]
        teacher_BK = view.rows("logits", others).mean(0)
        return {"distillation": now.ramp_up * self.distil(view.own.logits_BK, teacher_BK)}
