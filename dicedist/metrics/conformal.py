"""Thresholds that are chosen on held-out inputs: sets of labels, and which inputs count as unlike the training.

Shapes: N inputs, K classes. Probabilities may be of any float type; the functions also run inside an exported graph.
"""

import math

import torch
from scipy.special import betaincinv
from torch import Tensor

CONFORMAL = ("lac", "aps")
ACCEPTED = 0.95  # of the inputs in distribution
SLACK = 1e-6  # rounding in which the same network may differ between a GPU, an export and this


def nonconformity(p_NK: Tensor, kind: str) -> Tensor:
    """Nonconformity of each class [N, K]: classes with low scores belong into the set.

    lac: 1 - p (Sadinle et al., 2019: the smallest sets on average). aps: the probability of all classes down to this
    one, itself included (Romano et al., 2020, without randomisation: sets grow with the difficulty of the input).
    """
    if kind == "lac":
        return 1 - p_NK
    sorted_NK, order_NK = p_NK.sort(dim=1, descending=True)
    return sorted_NK.cumsum(dim=1).gather(1, order_NK.argsort(dim=1))


def quantile(scores_N: Tensor, alpha: float) -> float:
    """Split conformal: a new score exceeds it with a probability of at most alpha."""
    return scores_N.sort().values[place(len(scores_N), alpha) - 1].item()


def place(num_inputs: int, alpha: float) -> int:
    """The place of the quantile among the sorted scores, from 1: the ceil((N + 1)(1 - alpha))-th."""
    found = math.ceil((num_inputs + 1) * (1 - alpha) - 1e-9)  # 1 - 0.9 is a little more than 0.1
    if found > num_inputs:
        least = math.ceil(1000 / (num_inputs + 1)) / 1000
        raise ValueError(
            f"calibration.alpha={alpha:g} needs {math.ceil(1 / alpha - 1 - 1e-9)} calibration images, with "
            f"calibration.per_class of each class: there are {num_inputs}, so write calibration.alpha={least:g} or more"
        )
    return found


def quantiles(p_NK: Tensor, labels_N: Tensor, alpha: float, kind: str, per_class: bool) -> list[float]:
    """One quantile for all classes; or one for each, which gives every class its coverage of 1 - alpha."""
    scores_N = nonconformity(p_NK, kind).gather(1, labels_N[:, None])[:, 0]
    if not per_class:
        return [quantile(scores_N, alpha)]
    return [quantile(scores_N[labels_N == k], alpha) for k in range(p_NK.shape[1])]


def label_sets(p_NK: Tensor, limits: list[float], kind: str) -> Tensor:
    """Return whether each class belongs to the set of each input [N, K]; a set may be empty."""
    limits_K = torch.tensor(limits, dtype=p_NK.dtype, device=p_NK.device)
    return nonconformity(p_NK, kind) <= limits_K + SLACK


def reaches(scores_N: Tensor, threshold: float) -> Tensor:
    return scores_N >= threshold - SLACK


def acceptance_threshold(scores_N: Tensor) -> float:
    """The OOD score that 95 % of the inputs in distribution reach."""
    return scores_N.sort(descending=True).values[math.ceil(ACCEPTED * len(scores_N)) - 1].item()


def spread(nth: int, num_inputs: int) -> float:
    """Half the width of the interval that holds the share of new inputs within a threshold, 95 times in 100.

    The threshold is the nth of the sorted scores of so many inputs. Over draws of these inputs the share has the
    distribution Beta(nth, num_inputs + 1 - nth) (Vovk, 2012).
    """
    low, high = betaincinv(nth, num_inputs + 1 - nth, (0.025, 0.975))
    return float(high - low) / 2
