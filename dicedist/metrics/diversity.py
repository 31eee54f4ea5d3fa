"""Diversity of the members' errors, over pairs of members and over all of them (Kuncheva and Whitaker, 2003).

Shapes: M members, N inputs, P pairs i < j. A zero denominator gives None.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dicedist.metrics.calibration import mean_of_known

PAIRWISE = ("ratio_error", "q_statistic", "agreement", "agreement_oracle")


def diversity(predictions_MN: Tensor, labels_N: Tensor) -> dict[str, float | None]:
    """Return every measure of diversity. Pairwise ones are means over pairs that have a value; one member has none."""
    M, N = predictions_MN.shape
    if M == 1:
        return dict.fromkeys((*PAIRWISE, "kohavi_wolpert", "entropy"))
    pairs = pairwise(predictions_MN, labels_N)
    num_right_N = (predictions_MN == labels_N).sum(dim=0)
    num_wrong_N = M - num_right_N
    return {name: mean_of_known(pair[name] for pair in pairs) for name in PAIRWISE} | {
        "kohavi_wolpert": (num_right_N * num_wrong_N).sum().item() / (N * M**2),
        "entropy": torch.minimum(num_right_N, num_wrong_N).sum().item() / (N * (M - math.ceil(M / 2))),
    }


def pairwise(predictions_MN: Tensor, labels_N: Tensor) -> list[dict[str, Any]]:
    """Return one row for each pair of members: `members` [i, j] and the four measures of the pair."""
    M, N = predictions_MN.shape
    pairs_2P = torch.triu_indices(M, M, offset=1, device=predictions_MN.device)
    first_PN, second_PN = predictions_MN[pairs_2P]
    right_PN, also_right_PN = first_PN == labels_N, second_PN == labels_N
    counts = (
        (right_PN & also_right_PN).sum(dim=1),
        (right_PN & ~also_right_PN).sum(dim=1),
        (~right_PN & also_right_PN).sum(dim=1),
        (first_PN == second_PN).sum(dim=1),
    )
    rows = []
    for *members, n11, n10, n01, same in torch.stack((*pairs_2P, *counts), dim=1).tolist():
        n00 = N - n11 - n10 - n01
        rows.append(
            {
                "members": members,
                "ratio_error": _ratio(n01 + n10, n00),
                "q_statistic": _ratio(n11 * n00 - n01 * n10, n11 * n00 + n01 * n10),
                "agreement": same / N,
                "agreement_oracle": (n11 + n00) / N,
            }
        )
    return rows


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
