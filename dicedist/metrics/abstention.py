"""Confidence thresholds for abstention, chosen on held-out inputs for a target risk or a target coverage.

The error rate on the held-out inputs alone guarantees nothing: among many thresholds some look good by luck, mostly
thresholds with few answers. Two rules come with a guarantee for new inputs:

0 < guarantee < 1   With this probability over held-out sets, at most `risk` of the answers are wrong: learn then test
                    (Angelopoulos et al., 2021) by fixed-sequence testing.
guarantee = mean    On average over held-out sets, at most `risk` of the answers are wrong: accept a threshold if
                    (errors + 1)/(answered + 1) is at most `risk`.

Shapes: N inputs.
"""

import math

import torch
from scipy.special import bdtr
from torch import Tensor

NEVER = 2.0  # a threshold that no confidence reaches
MEAN = "mean"
FIRST = 0.05  # share of the inputs at which testing starts, or the next smaller testable count


def risk_threshold(confidence_N: Tensor, right_N: Tensor, risk: float, guarantee: float | str) -> float:
    """Return the threshold with the most answers whose risk stays below the target; NEVER if no threshold does.

    Inputs of equal confidence are answered together.
    """
    sorted_N, order_N = confidence_N.sort(descending=True)
    errors_N = (~right_N[order_N]).long().cumsum(0)
    is_last_N = torch.ones(len(sorted_N), dtype=torch.bool, device=sorted_N.device)
    is_last_N[:-1] = sorted_N.diff() != 0
    last_N = is_last_N.nonzero()[:, 0]  # the last input of each run of equal confidences
    if isinstance(guarantee, str):
        assert guarantee == MEAN, "the checks of the config refuse other words"
        safe_N = last_N[(errors_N[last_N] + 1) / (last_N + 2) <= risk]
        return sorted_N[safe_N[-1]].item() if len(safe_N) else NEVER
    threshold = NEVER
    for count in counts_to_test(len(sorted_N), risk, guarantee):
        end = last_N[torch.searchsorted(last_N, count - 1)]
        if not is_risk_below(risk, int(errors_N[end]), int(end) + 1, guarantee):
            break
        threshold = sorted_N[end].item()
    return threshold


def counts_to_test(num_inputs: int, risk: float, guarantee: float) -> list[int]:
    """Return the sequence of tests: how many of the most confident inputs each test covers.

    Each count is the smallest at which one more error is allowed. The sequence does not depend on the answers, so
    testing until the first failure needs no correction. Counts below 5 % of the inputs are skipped: they allow few
    errors, and one unlucky answer would end the sequence.
    """
    counts: list[int] = []
    for count in range(1, num_inputs + 1):
        if is_risk_below(risk, len(counts), count, guarantee):
            counts.append(count)
    first = max(0, sum(count <= FIRST * num_inputs for count in counts) - 1)
    return counts[first:] if counts[-1:] == [num_inputs] else [*counts[first:], num_inputs]


def is_risk_below(risk: float, errors: int, answered: int, guarantee: float) -> bool:
    """Test whether this number of errors shows a risk below the target, by the Clopper-Pearson bound."""
    return bool(bdtr(errors, answered, risk) <= 1 - guarantee)


def answers_needed(risk: float, guarantee: float | str) -> float:
    """Return the number of inputs, all answered correctly, that any threshold needs; infinity for a risk of 0."""
    if isinstance(guarantee, str):
        return math.ceil(1 / risk - 1) if risk else math.inf
    return math.ceil(math.log(1 - guarantee) / math.log(1 - risk)) if risk else math.inf


def coverage_threshold(confidence_N: Tensor, coverage: float) -> float:
    """Return the highest threshold that at least this share of the inputs reaches."""
    return confidence_N.sort(descending=True).values[math.ceil(coverage * len(confidence_N)) - 1].item()
