"""Deep mutual learning (Zhang et al., 2018): each member also fits the predictions of every other.

loss_i = CE_i + mean over j != i of KL(p_j || p_i), peers held constant. No temperature or ramp-up, as in its paper.
"""

from torch import Tensor

from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.schedules import Moment


class Term(Distillation):
    sends = ("logits",)

    def __init__(self) -> None:
        super().__init__(temperature=1.0)

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        others = [member for member in range(view.num_members) if member != view.index]
        peers_PBK = view.rows("logits", others)
        return {"mutual": self.distil(view.own.logits_BK.expand_as(peers_PBK), peers_PBK) / len(others)}
