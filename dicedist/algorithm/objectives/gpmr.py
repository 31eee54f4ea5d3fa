"""Gradient phase and magnitude regularization (Dabouei et al., 2020): A RECONSTRUCTION from its abstract.

sum CE_i + phase mean_n mean over pairs (cos(g_i, g_j) + 1/(M-1))^2
         + magnitude mean_n mean_i (|g_i| / mean_j |g_j| - 1)^2

M directions have a mean pairwise cosine of at least -1/(M-1), which a regular simplex reaches. This is the optimal
bound that the paper mentions. Its exact penalties and weights are not known, and ours are untuned.

Legend: M members, B inputs, X pixels, P pairs of members.
"""

import torch
from torch import Tensor

from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._pixel_gradients import TINY, OnPixelGradients, pairwise_cosines
from dicedist.algorithm.schedules import ScheduleValues


class Term(OnPixelGradients):
    def __init__(self, phase: float, magnitude: float):
        self.phase, self.magnitude = phase, magnitude

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        gradients_MBX = view.rows("pixel_gradient")
        return {
            "phase": self.phase * phase(gradients_MBX).mean(),
            "magnitude": self.magnitude * magnitude(gradients_MBX).mean(),
        }


def phase(gradients_MBX: Tensor) -> Tensor:
    """Return per input: 0 for a regular simplex, 1/(M-1)^2 for orthogonal gradients."""
    return (pairwise_cosines(gradients_MBX) + 1 / (len(gradients_MBX) - 1)).square().mean(0)


def magnitude(gradients_MBX: Tensor) -> Tensor:
    """Return per input: 0 if all members' gradients have the same norm."""
    norms_MB = torch.linalg.vector_norm(gradients_MBX, dim=-1)
    return (norms_MB / norms_MB.mean(0).clamp_min(TINY) - 1).square().mean(0)
