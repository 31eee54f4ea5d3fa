"""Variational conditional entropy bottleneck, equation 2 of the paper.

The KL is the paper's, with a sign error in its appendix corrected (docs/choices.md, 1); beta is scheduled as log(beta)
(docs/choices.md, 3).
"""

import torch
from torch import Tensor

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import ScheduleValues

TINY = -80.0  # below which softplus(x) is exp(x) to the last bit, and leaves the normal floats


class Term(Objective):
    mixes = True
    follows = ("log_beta",)

    def prior_rows(self, num_classes: int) -> int | None:
        return num_classes

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        bottleneck, own = view.member.bottleneck, view.own
        assert bottleneck is not None and own.scale_BD is not None
        prior_KD, mean_BD, scale_BD, raw_BD = bottleneck.prior_KD, own.mean_BD, own.scale_BD, own.raw_scale_BD

        def divergence(labels_B: Tensor) -> Tensor:
            return gaussian_divergence(mean_BD, scale_BD, self.backward_mean(prior_KD, labels_B), raw_BD).mean()

        compression = self.weight(now) * view.targets.expected(divergence)
        # Last, because gradients of the mean are added in the reverse order of its uses.
        return {"cross_entropy": view.targets.cross_entropy(own.logits_BK), "compression": compression}

    def backward_mean(self, prior_KD: Tensor, labels_B: Tensor) -> Tensor:
        return prior_KD[labels_B]

    def weight(self, now: ScheduleValues) -> float:
        return now.compression_ceb


def gaussian_divergence(
    mean_BD: Tensor, scale_BD: Tensor, prior_BD: Tensor, raw_scale_BD: Tensor | None = None
) -> Tensor:
    """KL(N(mean, scale^2) || N(prior, 1)), summed over dimensions: zero at scale = 1, mean = prior.

    raw_scale_BD: if the scale is its softplus, the divergence stays finite where the scale underflows to zero.
    """
    # The logarithm after the square: gradients of the scale are added in the reverse order of its uses.
    return 0.5 * (scale_BD.square() - 2 * logarithm(scale_BD, raw_scale_BD) - 1 + (mean_BD - prior_BD).square()).sum(-1)


def logarithm(scale_BD: Tensor, raw_scale_BD: Tensor | None) -> Tensor:
    """Far below zero softplus(x) is exp(x), whose logarithm is x: finite, and with a gradient."""
    if raw_scale_BD is None:
        return scale_BD.log()
    is_tiny_BD = raw_scale_BD < TINY
    return torch.where(is_tiny_BD, raw_scale_BD, scale_BD.masked_fill(is_tiny_BD, 1.0).log())
