"""Conformal label sets, and the threshold of OOD detection, both chosen on held-out inputs.

Shapes: N inputs, K classes. Probabilities may be of any float type. The functions also run inside an exported graph.
"""

import math

import torch
from scipy.special import betaincinv
from torch import Tensor

CONFORMAL = ("lac", "aps")
ACCEPTED = 0.95  # share of the in-distribution inputs
SLACK = 1e-6  # largest rounding difference of one network between a GPU, an export and this process


def nonconformity(p_NK: Tensor, kind: str) -> Tensor:
    """Return the nonconformity of each class [N, K]. Label sets hold the classes with low scores.

    lac: 1 - p (Sadinle et al., 2019: the smallest sets on average). aps: the probability of all classes down to this
    one, itself included (Romano et al., 2020, without randomization: sets grow with the difficulty of the input).
    """
    if kind == "lac":
        return 1 - p_NK
    sorted_NK, order_NK = p_NK.sort(dim=1, descending=True)
    return sorted_NK.cumsum(dim=1).gather(1, order_NK.argsort(dim=1))


def quantile(scores_N: Tensor, alpha: float) -> float:
    """Return the split conformal quantile: a new score exceeds this value with a probability of at most alpha."""
    return scores_N.sort().values[place(len(scores_N), alpha) - 1].item()


def place(num_inputs: int, alpha: float) -> int:
    """Return the place of the quantile among the sorted scores, counted from 1: ceil((N + 1)(1 - alpha))."""
    nth = math.ceil((num_inputs + 1) * (1 - alpha) - 1e-9)  # 1 - 0.9 is a little more than 0.1
    if nth > num_inputs:
        min_alpha = math.ceil(1000 / (num_inputs + 1)) / 1000
        raise ValueError(
            f"calibration.alpha={alpha:g} needs {math.ceil(1 / alpha - 1 - 1e-9)} calibration images, with "
            f"calibration.per_class of each class: there are {num_inputs}, so write calibration.alpha={min_alpha:g} or "
            "more"
        )
    return nth


def quantiles(p_NK: Tensor, labels_N: Tensor, alpha: float, kind: str, per_class: bool) -> list[float]:
    """Return one quantile for all classes. per_class: one for each, so that every class has the coverage 1 - alpha."""
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
    """Return the OOD score that 95 % of the in-distribution inputs reach."""
    return scores_N.sort(descending=True).values[math.ceil(ACCEPTED * len(scores_N)) - 1].item()


def spread(nth: int, num_inputs: int) -> float:
    """Return half the width of the 95 % interval of the share of new inputs that fall within a threshold.

    The threshold is the nth of num_inputs sorted scores. Over draws of these inputs the share has the distribution
    Beta(nth, num_inputs + 1 - nth) (Vovk, 2012).
    """
    low, high = betaincinv(nth, num_inputs + 1 - nth, (0.025, 0.975))
    return float(high - low) / 2
