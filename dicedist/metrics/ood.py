"""Measures of out-of-distribution detection by a score; in-distribution is the positive class.

Shapes: T distinct scores. Every measure depends only on the order and ties of the scores.
"""

import zlib

import torch
from torch import Tensor

RESAMPLES, AT_ONCE = 200, 25


def ood(scores_in: Tensor, scores_out: Tensor) -> dict[str, float]:
    """Return the measures of one score per image, higher for in-distribution. Ties fall on the same side."""
    scores = torch.cat([scores_in, scores_out]).double()
    if not (len(scores_in) and len(scores_out) and scores.isfinite().all()):
        raise ValueError("ood needs finite scores for at least one in-distribution and one out-of-distribution image")
    distinct_T, place = scores.unique(return_inverse=True)
    # Counts per score, from the highest down: a cumulative sum accepts all images that score at least this much.
    in_T = torch.bincount(place[: len(scores_in)], minlength=len(distinct_T)).flip(0).double()
    out_T = torch.bincount(place[len(scores_in) :], minlength=len(distinct_T)).flip(0).double()
    tpr_T, fpr_T = in_T.cumsum(0) / len(scores_in), out_T.cumsum(0) / len(scores_out)
    rejected_in_T, rejected_out_T = in_T.flip(0).cumsum(0) / len(scores_in), out_T.flip(0).cumsum(0) / len(scores_out)
    return {
        "fpr95": fpr_T[tpr_T >= 0.95][0].item(),
        "fpr95_ood_positive": rejected_in_T[rejected_out_T >= 0.95][0].item(),
        "detection": ((1 - tpr_T + fpr_T) / 2).min().item(),
        "auroc": _wins(in_T, out_T) / (len(scores_in) * len(scores_out)),
        "aupr_in": _average_precision(in_T, out_T),
        "aupr_out": _average_precision(out_T.flip(0), in_T.flip(0)),
    }


def auroc_resamples(scores_in: Tensor, scores_out: Tensor, name: str = "") -> Tensor:
    """Return the AUROC of RESAMPLES bootstrap draws of both sides.

    Each side has its own generator. All OOD sets share the drawn in-distribution images, so the resamples of several
    sets may be averaged. The name of a set seeds the draws of its images.
    """
    scores = torch.cat([scores_in, scores_out]).double()
    distinct_T, place = scores.unique(return_inverse=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1 + zlib.crc32(name.encode()))]
    found = []
    for _ in range(RESAMPLES // AT_ONCE):
        sides = []
        for place_N, draws in zip(place.split([len(scores_in), len(scores_out)]), generators, strict=True):
            rows_BN = torch.randint(len(place_N), (AT_ONCE, len(place_N)), generator=draws).to(place_N.device)
            counts_BT = torch.zeros(AT_ONCE, len(distinct_T), dtype=torch.float64, device=scores.device)
            sides.append(counts_BT.scatter_add_(1, place_N[rows_BN], torch.ones_like(rows_BN, dtype=torch.float64)))
        in_BT, out_BT = sides
        below_BT = out_BT.cumsum(1) - out_BT / 2
        found.append((in_BT * below_BT).sum(1) / (len(scores_in) * len(scores_out)))
    return torch.cat(found)


def percentiles(resamples_R: Tensor) -> list[float]:
    """Return the interval that holds 95 % of the resamples."""
    return torch.quantile(resamples_R, torch.tensor([0.025, 0.975], dtype=resamples_R.dtype)).tolist()


def _wins(in_T: Tensor, out_T: Tensor) -> float:
    """Return the number of (in, out) pairs ranked correctly; a tie counts one half."""
    return (out_T * (in_T.cumsum(0) - in_T / 2)).sum().item()


def _average_precision(positive_T: Tensor, negative_T: Tensor) -> float:
    """Return the mean over positives of the precision at their score. Counts go from the most positive score down."""
    accepted_T = (positive_T + negative_T).cumsum(0)
    return (positive_T * positive_T.cumsum(0) / accepted_T).sum().item() / positive_T.sum().item()
