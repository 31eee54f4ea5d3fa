"""Collaborative learning with intermediate-level representation sharing (Song and Chai, 2018), for branches.

loss_i = CE_i + r KD(z_i <- mean of the others' logits), with peers held constant. At the output of the trunk
the gradient is divided by M.
"""

from torch import Tensor

from dicedist.algorithm.batch import Views
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.probes import Probe
from dicedist.algorithm.schedules import ScheduleValues


class DividedTrunk(Probe):
    """Divides the gradient by M at the output of the trunk."""

    def on_branches(self, outputs: Views) -> Views:
        for output in (each for each in outputs.tensors if each.requires_grad):  # the trunk may be frozen
            output.register_hook(lambda gradient: gradient / self.num_members)
        return outputs


class Term(Distillation):
    follows = ("ramp_up",)
    sends = ("logits",)
    probes = (DividedTrunk,)

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        others = [member for member in range(view.num_members) if member != view.index]
        teacher_BK = view.rows("logits", others).mean(0)
        return {"distillation": now.ramp_up * self.distil(view.own.logits_BK, teacher_BK)}
