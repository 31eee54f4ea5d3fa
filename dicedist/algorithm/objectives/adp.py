"""Adaptive diversity promoting (Pang et al., 2019): members differ in their probabilities of the wrong classes.

sum CE_i - alpha H(mean_i p_i) - beta log det(N N^T + 1e-6 I), per input, averaged over the batch; the M rows of N are
the probabilities without the true class, scaled to L2 norm 1. This scaling cancels the scaling of the softmax, so the
rows are built from the logits of the wrong classes. The rows are in double precision because similar rows make the
determinant about 1e-6.

Legend: M members, B inputs, K classes, W wrong classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import ScheduleValues


class Term(Objective):
    sends = ("logits",)
    min_members = 2

    def __init__(self, alpha: float, beta: float, ramp_up: bool = False):
        """ramp_up: both terms grow with the ramp-up, as in the DICE paper's tables; the ADP paper has no ramp-up."""
        self.alpha, self.beta = alpha, beta
        self.follows = ("ramp_up",) if ramp_up else ()

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        logits_MBK, weight = view.rows("logits"), now.ramp_up if self.follows else 1.0
        return {
            "entropy": -weight * self.alpha * entropy(logits_MBK).mean(),
            "volume": -weight * self.beta * log_volume(logits_MBK, view.labels_B).mean().to(logits_MBK.dtype),
        }


def entropy(logits_MBK: Tensor) -> Tensor:
    """Return the entropy H of the ensemble's prediction, per input."""
    p_BK = logits_MBK.softmax(-1).mean(0)
    return -(p_BK * (p_BK + 1e-20).log()).sum(-1)


def log_volume(logits_MBK: Tensor, labels_B: Tensor) -> Tensor:
    """Return log det(N N^T) per input: large if members give probability to different wrong classes."""
    num_members, _, num_classes = logits_MBK.shape
    wrong_W = torch.arange(num_classes - 1, device=labels_B.device)
    wrong_BW = wrong_W + (wrong_W >= labels_B[:, None])
    wrong_MBW = logits_MBK.double().gather(2, wrong_BW.expand(num_members, -1, -1))
    rows_MBW = F.normalize(wrong_MBW.softmax(-1), dim=-1)
    products_BMM = torch.einsum("ibw,jbw->bij", rows_MBW, rows_MBW)
    return torch.logdet(products_BMM + 1e-6 * torch.eye(num_members, dtype=torch.float64, device=labels_B.device))
