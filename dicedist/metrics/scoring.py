"""Probabilities of an ensemble from its members' logits, with their entropies and proper scores.

Shapes: M members, N inputs, K classes. All in float64; log_p_NK are natural log-probabilities.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def ensemble_logits(logits_MNK: Tensor, average: str = "logits") -> Tensor:
    """Return logits_NK whose softmax is the ensemble's prediction: mean logits, or the log of mean probabilities."""
    if average == "logits":
        return logits_MNK.mean(dim=0, dtype=torch.float64)
    if average == "probabilities":
        log_p_MNK = torch.log_softmax(logits_MNK, dim=-1, dtype=torch.float64)
        return torch.logsumexp(log_p_MNK, dim=0) - math.log(len(log_p_MNK))
    raise ValueError(f"average is 'logits' or 'probabilities', not {average!r}")


def ensemble_log_probabilities(logits_MNK: Tensor, average: str = "logits", temperature: float = 1.0) -> Tensor:
    """Return log_p_NK of the ensemble. The temperature divides the averaged logits, never the members' own logits."""
    return torch.log_softmax(ensemble_logits(logits_MNK, average) / temperature, dim=-1)


def confidence(logits_NK: Tensor) -> Tensor:
    """Return the maximum softmax probability of each input."""
    return logits_NK.double().softmax(dim=-1).amax(dim=-1)


def entropies(logits_MNK: Tensor) -> dict[str, Tensor]:
    """Return for each input [N], in nats: the entropy of the mean, the members' mean entropy, and their difference.

    The difference is the mutual information between the class and the choice of a member: the members' disagreement.
    The mean is over the members' probabilities, also for an ensemble that averages logits.
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


def hits(log_p_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Return 1 for each input whose most probable class is the label, else 0. The mean is the accuracy."""
    return (log_p_NK.argmax(dim=-1) == labels_N).double()


def surprisals(log_p_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Return -log p of each label. The mean is the NLL."""
    return -log_p_NK.gather(1, labels_N[:, None]).squeeze(1)


def squared_errors(log_p_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Return the squared distance of each input's probabilities from its label. The mean is the Brier score."""
    return (log_p_NK.exp() - one_hot(labels_N, log_p_NK.shape[1])).square().sum(dim=1)


def accuracy(log_p_NK: Tensor, labels_N: Tensor) -> float:
    return hits(log_p_NK, labels_N).mean().item()


def nll(log_p_NK: Tensor, labels_N: Tensor) -> float:
    return surprisals(log_p_NK, labels_N).mean().item()


def brier(log_p_NK: Tensor, labels_N: Tensor) -> float:
    return squared_errors(log_p_NK, labels_N).mean().item()


def brier_per_class(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the paper's Brier score: the sum over classes divided by their number."""
    return brier(log_p_NK, labels_N) / log_p_NK.shape[1]
