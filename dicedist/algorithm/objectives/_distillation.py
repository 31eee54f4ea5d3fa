"""Distillation, KD(s <- t): the logits s of a student approach the logits t of a teacher."""

from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.objectives import Objective


class Distillation(Objective):
    min_members = 2
    mixes = True

    def __init__(self, temperature: float):
        if not temperature > 0:
            raise ValueError(f"distillation with temperature={temperature}: write a number above 0")
        self.temperature = temperature

    def distil(self, student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
        return distil(student_BK, teacher_BK, self.temperature)


def distil(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(softmax(t/T) || softmax(s/T)), averaged over inputs and summed over leading dimensions."""
    log_s_BK, log_t_BK = ((logits / temperature).log_softmax(-1) for logits in (student_BK, teacher_BK))
    divergence = F.kl_div(log_s_BK, log_t_BK, reduction="sum", log_target=True)
    return temperature**2 * divergence / student_BK.shape[-2]
