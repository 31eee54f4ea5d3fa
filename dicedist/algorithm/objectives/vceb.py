"""Variational conditional entropy bottleneck, equation 2 of the paper.

loss = CE(logits, y) + (1/beta) KL(N(mean, scale^2) || N(b(y), 1)), with a learned mean b(y) for each class.

The appendix of the paper prints the KL with a sign error, which is corrected here (docs/choices.md, 1). beta is
scheduled as log(beta) (docs/choices.md, 3).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import ScheduleValues

TINY = -80.0  # below this x, softplus(x) equals exp(x) to the last bit and becomes denormal


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
        # Last, because autograd adds the gradients of the mean in the reverse order of its uses.
        return {"cross_entropy": view.targets.cross_entropy(own.logits_BK), "compression": compression}

    def backward_mean(self, prior_KD: Tensor, labels_B: Tensor) -> Tensor:
        return F.embedding(labels_B, prior_KD)

    def weight(self, now: ScheduleValues) -> float:
        return now.compression_ceb


def gaussian_divergence(
    mean_BD: Tensor, scale_BD: Tensor, prior_BD: Tensor, raw_scale_BD: Tensor | None = None
) -> Tensor:
    """Return KL(N(mean, scale^2) || N(prior, 1)), summed over dimensions: zero at scale = 1, mean = prior.

    raw_scale_BD: the scale before softplus. With it, the divergence stays finite when the scale underflows to zero.
    """
    if raw_scale_BD is None:
        return 0.5 * (scale_BD.square() - 2 * scale_BD.log() - 1 + (mean_BD - prior_BD).square()).sum(-1)
    divergence_B = DivergenceOfSoftplus.apply(mean_BD, prior_BD, raw_scale_BD, scale_BD, scale_BD)
    assert isinstance(divergence_B, Tensor)
    return divergence_B


class DivergenceOfSoftplus(torch.autograd.Function):
    """The divergence, with gradients that take half of the kernels that autograd would launch.

    Far below zero softplus(x) is exp(x), and its logarithm is x: finite, with a gradient. The scale is passed twice,
    for its logarithm and for its square, so that autograd adds the two gradients in the order of earlier versions.
    """

    @staticmethod
    def forward(
        context: Any, mean_BD: Tensor, prior_BD: Tensor, raw_BD: Tensor, scale_BD: Tensor, squared_BD: Tensor
    ) -> Tensor:
        is_tiny_BD, difference_BD = raw_BD < TINY, mean_BD - prior_BD
        log_BD = torch.where(is_tiny_BD, raw_BD, scale_BD.log())
        context.save_for_backward(scale_BD, difference_BD, is_tiny_BD)
        context.prior = prior_BD.shape
        total_BD = torch.sub(squared_BD.square(), log_BD, alpha=2).sub_(1).add_(difference_BD.square())
        return total_BD.sum(-1).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient_B: Tensor) -> tuple[Tensor, ...]:
        scale_BD, difference_BD, is_tiny_BD = context.saved_tensors
        gradient_B1, negative_B1 = gradient_B[:, None], -gradient_B[:, None]
        of_mean_BD = gradient_B1 * difference_BD
        of_prior = of_mean_BD.neg().sum_to_size(context.prior)
        of_log_BD = (negative_B1 / scale_BD).masked_fill_(is_tiny_BD, 0)
        return of_mean_BD, of_prior, is_tiny_BD * negative_B1, of_log_BD, gradient_B1 * scale_BD
