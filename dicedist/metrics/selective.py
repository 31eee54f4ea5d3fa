"""Selective prediction: risk among the inputs that the ensemble accepts, the most confident first.

Shapes: N inputs, R accepted shares (coverages), K classes. log_p_NK are natural log-probabilities in float64. Inputs of
equal confidence are accepted in random order. Every value is the exact mean over these orders.
"""

import math

import torch
from torch import Tensor

from dicedist.metrics.calibration import shared_among_equals
from dicedist.metrics.ood import ood

COVERAGE = 0.9
CURVE_POINTS = 50


def aurc(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the area under the risk-coverage curve: mean over n of the error rate of the n most confident inputs."""
    return _mean_risk(_errors_by_confidence(log_p_NK, labels_N))


def e_aurc(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the excess of the AURC over the AURC of an ideal confidence, which ranks all errors last."""
    errors_N = _errors_by_confidence(log_p_NK, labels_N)
    num_wrong = round(errors_N.sum().item())
    errors_last_N = torch.zeros_like(errors_N)
    errors_last_N[len(errors_N) - num_wrong :] = 1
    return _mean_risk(errors_N) - _mean_risk(errors_last_N)


def augrc(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the area under the generalized curve (Traub et al., 2024), whose risk counts errors among all inputs."""
    errors_N = _errors_by_confidence(log_p_NK, labels_N)
    return ((errors_N.cumsum(0) - errors_N / 2).sum() / len(errors_N) ** 2).item()


def accuracy_at_coverage(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the accuracy on the 90 % most confident inputs."""
    errors_N = _errors_by_confidence(log_p_NK, labels_N)
    return 1 - errors_N[: math.ceil(COVERAGE * len(errors_N))].mean().item()


def errors_accepted(log_p_NK: Tensor, labels_N: Tensor) -> float | None:
    """Return the share of errors accepted at the threshold that accepts 95 % of the hits; None without either."""
    confidence_N, predictions_N = log_p_NK.max(dim=1)
    right_N = predictions_N == labels_N
    if right_N.all() or not right_N.any():
        return None
    return ood(confidence_N[right_N], confidence_N[~right_N])["fpr95"]


def risk_coverage(log_p_NK: Tensor, labels_N: Tensor) -> dict[str, list[float]]:
    """Return points of the curve for a figure: the share of inputs accepted, and the error rate among them."""
    errors_N = _errors_by_confidence(log_p_NK, labels_N)
    N = len(errors_N)
    counts_R = torch.linspace(0, N, min(N, CURVE_POINTS) + 1).round().long()[1:]
    risks_R = errors_N.cumsum(0)[counts_R - 1] / counts_R
    return {"coverage": (counts_R / N).tolist(), "risk": risks_R.tolist()}


def _errors_by_confidence(log_p_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Return 1 for an error and 0 for a hit, from the most confident input down. Ties share their mean."""
    top_N, predictions_N = log_p_NK.max(dim=1)
    sorted_N, order_N = top_N.sort(descending=True)
    errors_N = (predictions_N != labels_N)[order_N].double()
    return shared_among_equals(sorted_N[None], errors_N[None])[0]


def _mean_risk(errors_N: Tensor) -> float:
    counts_N = torch.arange(1, len(errors_N) + 1, device=errors_N.device)
    return (errors_N.cumsum(0) / counts_N).mean().item()
