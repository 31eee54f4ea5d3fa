"""The lowest confidence that is answered, so that few of the answers are wrong, or so that enough inputs are answered.

A threshold that only looks at the share of errors on the inputs that chose it promises nothing for new inputs: of many
thresholds some look good by luck, those with few answers most of all. Two rules promise something:

0 < guarantee < 1   with this probability over held-out sets, at most `risk` of the answers to new inputs are wrong:
                    learn then test (Angelopoulos et al., 2021) by fixed-sequence testing
guarantee = mean    on average over held-out sets they are: (errors + 1)/(answered + 1) is at most `risk`

Shapes: N inputs.
"""

import math

import torch
from scipy.special import bdtr
from torch import Tensor

NEVER = 2.0  # a threshold that no confidence reaches
MEAN = "mean"
FIRST = 0.05  # share of the inputs: fewer are tested only where more cannot be


def risk_threshold(confidence_N: Tensor, right_N: Tensor, risk: float, guarantee: float | str) -> float:
    """Return the threshold with the most answers that keeps the risk; NEVER if there is none.

    Inputs of equal confidence are answered together.
    """
    sorted_N, order_N = confidence_N.sort(descending=True)
    errors_N = (~right_N[order_N]).long().cumsum(0)
    is_last_N = torch.ones(len(sorted_N), dtype=torch.bool, device=sorted_N.device)
    is_last_N[:-1] = sorted_N.diff() != 0
    last_N = is_last_N.nonzero()[:, 0]  # of equal confidences
    if isinstance(guarantee, str):
        assert guarantee == MEAN, "refused with the config"
        kept_N = last_N[(errors_N[last_N] + 1) / (last_N + 2) <= risk]
        return sorted_N[kept_N[-1]].item() if len(kept_N) else NEVER
    threshold = NEVER
    for count in counts_to_test(len(sorted_N), risk, guarantee):
        end = last_N[torch.searchsorted(last_N, count - 1)]
        if not is_kept(int(errors_N[end]), int(end) + 1, risk, guarantee):
            break
        threshold = sorted_N[end].item()
    return threshold


def counts_to_test(num_inputs: int, risk: float, guarantee: float) -> list[int]:
    """Return how many inputs, the most confident ones, are tested one after another: those that allow one error more.

    The sequence does not depend on the answers, so testing until the first failure needs no correction. Counts below
    5 % of the inputs are passed over: they allow few errors, and one unlucky answer would end the sequence.
    """
    counts: list[int] = []
    for count in range(1, num_inputs + 1):
        if is_kept(len(counts), count, risk, guarantee):
            counts.append(count)
    first = max(0, sum(count <= FIRST * num_inputs for count in counts) - 1)
    return counts[first:] if counts[-1:] == [num_inputs] else [*counts[first:], num_inputs]


def is_kept(errors: int, answered: int, risk: float, guarantee: float) -> bool:
    """Return whether so few errors show a risk below the target: Clopper and Pearson's bound, as a test."""
    return bool(bdtr(errors, answered, risk) <= 1 - guarantee)


def answers_needed(risk: float, guarantee: float | str) -> float:
    """Return how many right answers in a row let anything be answered at this risk; infinity for a risk of 0."""
    if isinstance(guarantee, str):
        return math.ceil(1 / risk - 1) if risk else math.inf
    return math.ceil(math.log(1 - guarantee) / math.log(1 - risk)) if risk else math.inf


def coverage_threshold(confidence_N: Tensor, coverage: float) -> float:
    """Return the confidence that this share of the inputs reaches."""
    return confidence_N.sort(descending=True).values[math.ceil(coverage * len(confidence_N)) - 1].item()
