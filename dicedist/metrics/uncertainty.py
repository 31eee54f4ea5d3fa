"""Where uncertainty comes from: what every member is unsure of, and what they disagree on.

Shapes: M members, N inputs, K classes. Entropies in nats. The split holds for the mean of the members' probabilities,
and is taken of that mean whichever average the ensemble predicts with.
"""

import math

import torch
from torch import Tensor


def entropies(logits_MNK: Tensor) -> dict[str, Tensor]:
    """For each input [N]: the entropy of the mean, the mean entropy of the members, and their difference.

    The difference is the mutual information between the class and the choice of a member: the members' disagreement.
    """
    log_p_MNK = torch.log_softmax(logits_MNK.double(), dim=-1)
    log_mean_NK = torch.logsumexp(log_p_MNK, dim=0) - math.log(len(log_p_MNK))
    predictive_N, expected_N = entropy(log_mean_NK), entropy(log_p_MNK).mean(dim=0)
    return {
        "predictive_entropy": predictive_N,
        "expected_entropy": expected_N,
        "mutual_information": (predictive_N - expected_N).clamp_min(0),
    }


def entropy(log_p_NK: Tensor) -> Tensor:
    return -(log_p_NK.exp() * log_p_NK).sum(dim=-1)
