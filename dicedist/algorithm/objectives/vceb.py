"""Variational conditional entropy bottleneck, equation 2 of the paper.

The KL is the paper's, with a sign error in its appendix corrected (docs/choices.md, 1); beta is scheduled as log(beta)
(docs/choices.md, 3).
"""

from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import Moment


class Term(Objective):
    prior = "class"
    follows = ("log_beta",)

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        bottleneck, own = view.member.bottleneck, view.own
        assert bottleneck is not None and own.scale_BD is not None
        prior_BD = self.backward_mean(bottleneck.prior_KD, view.labels_B)
        divergence_B = gaussian_divergence(own.mean_BD, own.scale_BD, prior_BD, own.log_scale_BD)
        return {
            "cross_entropy": F.cross_entropy(own.logits_BK, view.labels_B),
            "compression": self.weight(now) * divergence_B.mean(),
        }

    def backward_mean(self, prior_KD: Tensor, labels_B: Tensor) -> Tensor:
        return prior_KD[labels_B]

    def weight(self, now: Moment) -> float:
        return now.compression_ceb


def gaussian_divergence(
    mean_BD: Tensor, scale_BD: Tensor, prior_BD: Tensor, log_scale_BD: Tensor | None = None
) -> Tensor:
    """KL(N(mean, scale^2) || N(prior, 1)), summed over dimensions: zero at scale = 1, mean = prior."""
    log_scale_BD = scale_BD.log() if log_scale_BD is None else log_scale_BD
    return 0.5 * (scale_BD.square() - 2 * log_scale_BD - 1 + (mean_BD - prior_BD).square()).sum(-1)
