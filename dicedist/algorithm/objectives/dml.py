"""Deep mutual learning (Zhang et al., 2018): each member also fits the predictions of every other.

loss_i = CE_i + mean over j != i of KL(p_j || p_i), with peers held constant. The DML paper has neither a temperature
nor a ramp-up.
"""

from torch import Tensor

from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation, distil
from dicedist.algorithm.schedules import ScheduleValues


class Term(Distillation):
    sends = ("logits",)

    def __init__(self, ramp_up: bool = False) -> None:
        """ramp_up: the distillation grows with the ramp-up, as in the DICE paper's tables."""
        super().__init__(temperature=1.0)
        self.follows = ("ramp_up",) if ramp_up else ()

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        others = [member for member in range(view.num_members) if member != view.index]
        peers_PBK = view.rows("logits", others)
        weight = now.ramp_up if self.follows else 1.0
        return {"mutual": weight * mutual(view.own.logits_BK, peers_PBK)}


def mutual(own_BK: Tensor, peers_PBK: Tensor) -> Tensor:
    """Return the mean over peers of KL(p_j || p_i)."""
    return distil(own_BK.expand_as(peers_PBK), peers_PBK, 1.0) / len(peers_PBK)
