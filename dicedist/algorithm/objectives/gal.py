"""Gradient alignment loss (Kariyappa and Qureshi, 2019): members' losses depend on the pixels in different ways.

(1/M) sum CE_i + weight mean_n log(sum over pairs exp cos(g_i, g_j) + 1e-20), times M, so that cross-entropy has the
same weight as in every other method. Two public implementations differ by this factor; the authors published none.

Legend: M members, B inputs, X pixels, P pairs of members.
"""

from torch import Tensor

from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._pixel_gradients import OnPixelGradients, pairwise_cosines
from dicedist.algorithm.schedules import ScheduleValues


class Term(OnPixelGradients):
    def __init__(self, weight: float):
        self.weight = weight

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        return {"alignment": view.num_members * self.weight * alignment(view.rows("pixel_gradient")).mean()}


def alignment(gradients_MBX: Tensor) -> Tensor:
    """Return per input: 1 + log P if all gradients agree, log P if they are orthogonal."""
    return (pairwise_cosines(gradients_MBX).exp().sum(0) + 1e-20).log()
