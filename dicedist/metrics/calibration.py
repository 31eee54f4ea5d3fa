"""Calibration: is the ensemble right as often as it says, before and after temperature scaling?

Shapes: N inputs, K classes, R bins (or runs). log_p_NK are natural log-probabilities in float64.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_BINS = 15
TACE_THRESHOLD = 1e-3
# The fit stops here if the minimum lies at zero or infinity: a half without errors, or a useless predictor.
TEMPERATURE_RANGE = (1e-2, 1e6)

Measure = Callable[[Tensor, Tensor], float | None]


def ece(log_p_NK: Tensor, labels_N: Tensor) -> float:
    _, confidence_R, correct_R = _bin_sums(log_p_NK, labels_N)
    return ((confidence_R - correct_R).abs().sum() / len(labels_N)).item()


def mce(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the largest gap between confidence and accuracy over the bins of `ece`, regardless of their size."""
    count_R, confidence_R, correct_R = _bin_sums(log_p_NK, labels_N)
    return ((confidence_R - correct_R).abs() / count_R.clamp_min(1)).max().item()


def adaptive_ece(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the ECE over bins of equal size (the first ones hold one input more); ties share their mean gap."""
    N = len(labels_N)
    top_N, predictions_N = log_p_NK.max(dim=1)
    confidence_N, order_N = top_N.exp().sort()
    gaps_N = confidence_N - (predictions_N == labels_N)[order_N].double()
    gaps_N = shared_among_equals(confidence_N[None], gaps_N[None])[0]
    return math.fsum(abs(gaps.sum().item()) for gaps in gaps_N.tensor_split(min(N, NUM_BINS))) / N


def classwise_ece(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the mean over classes of the ECE of the class's probability, one class against the rest (Kull, 2019)."""
    N, K = log_p_NK.shape
    p_NK = log_p_NK.exp()
    classes_K = torch.arange(K, device=labels_N.device)
    cells_NK = torch.bucketize(p_NK, _inner_edges(log_p_NK)) + NUM_BINS * classes_K
    gaps_NK = p_NK - (labels_N[:, None] == classes_K).double()
    sums = torch.bincount(cells_NK.flatten(), gaps_NK.flatten(), NUM_BINS * K)
    return (sums.abs().sum() / (N * K)).item()


def reliability(log_p_NK: Tensor, labels_N: Tensor) -> list[dict[str, float | None]]:
    """Return the bins of `ece` for a reliability diagram. Confidence and accuracy of an empty bin are None."""
    sums = zip(*(sums_R.tolist() for sums_R in _bin_sums(log_p_NK, labels_N)), strict=True)
    return [
        {
            "lower": r / NUM_BINS,
            "upper": (r + 1) / NUM_BINS,
            "count": int(count),
            "confidence": confidence / count if count else None,
            "accuracy": correct / count if count else None,
        }
        for r, (count, confidence, correct) in enumerate(sums)
    ]


def tace(log_p_NK: Tensor, labels_N: Tensor) -> float:
    """Return the thresholded adaptive calibration error, normalized by N*K (docs/choices.md, 18).

    A run of size s adds s/(N*K) * |mean p - mean hit| = |sum of (p - hit)|/(N*K), a difference of two cumulative sums.
    """
    N, K = log_p_NK.shape
    p_KN, order_KN = log_p_NK.exp().T.contiguous().sort(dim=1)
    hits_KN = labels_N[order_KN] == torch.arange(K, device=labels_N.device)[:, None]
    gaps_KN = shared_among_equals(p_KN, p_KN - hits_KN.double())
    skipped_K1 = (p_KN <= TACE_THRESHOLD).sum(dim=1, keepdim=True)
    size_K1 = (N - skipped_K1) // NUM_BINS
    edges_KR = skipped_K1 + size_K1 * torch.arange(NUM_BINS + 1, device=labels_N.device)
    edges_KR[:, -1] = N  # the last run takes the rest
    run_sums_KR = pad(gaps_KN.cumsum(dim=1), (1, 0)).gather(1, edges_KR).diff(dim=1)
    return (run_sums_KR.abs().sum() / (N * K)).item()


def fit_temperature(logits_NK: Tensor, labels_N: Tensor) -> float:
    """Return the T in TEMPERATURE_RANGE that minimizes the NLL of logits/T; 1 if no other T is better.

    If all inputs are classified correctly, T is 1 too: the NLL then has no minimum, because it falls with T towards 0.
    The NLL is convex in 1/T. The fit uses Newton's method on log(1/T), and bisection where Newton does not converge.
    """
    logits_NK = logits_NK.double()
    # Relative to the true class, the NLL is a plain logsumexp, and constant logits give the same NLL at every T.
    margins_NK = logits_NK - logits_NK.gather(1, labels_N[:, None])
    if (margins_NK <= 0).all():
        return 1.0
    coldest, hottest = TEMPERATURE_RANGE
    low, high = -math.log(hottest), -math.log(coldest)
    log_inverse, step = 0.0, high - low
    while abs(step) > 1e-10:
        slope, curvature = _slope_and_curvature(margins_NK, math.exp(log_inverse))
        low, high = (log_inverse, high) if slope < 0 else (low, log_inverse)
        newton = -slope / curvature if curvature > 0 else math.inf
        converging = low < log_inverse + newton < high and abs(newton) <= abs(step) / 2
        step = newton if converging else (low + high) / 2 - log_inverse
        log_inverse += step
    return min(1.0, math.exp(-log_inverse), key=lambda T: torch.logsumexp(margins_NK / T, dim=1).mean().item())


def temperature_spread(logits_NK: Tensor, labels_N: Tensor, temperature: float) -> float | None:
    """Return half the width of the 95 % confidence interval of a fitted temperature.

    The variance is the sandwich estimate. None if the fit found no minimum.
    """
    coldest, hottest = TEMPERATURE_RANGE
    margins_NK = logits_NK.double() - logits_NK.double().gather(1, labels_N[:, None])
    slopes_N, variances_N = _moments_of_margins(margins_NK, 1 / temperature)
    if temperature == 1 or not 2 * coldest < temperature < hottest / 2 or len(labels_N) < 2 or not variances_N.any():
        return None
    of_inverse = slopes_N.std().item() / math.sqrt(len(labels_N)) / variances_N.mean().item()
    return 1.96 * temperature**2 * of_inverse


def split_half(
    logits_NK: Tensor, labels_N: Tensor, measure_fns: Mapping[str, Measure], seed: int = 0, folds: int = 1
) -> dict[str, float | None]:
    """Return each measure on one half with T fitted on the other: mean over both halves of `folds` random splits."""
    if folds < 1:
        raise ValueError(f"folds, the number of random splits, must be at least 1: got {folds}")
    N = len(labels_N)
    names = ["temperature", *measure_fns]
    if N < 2:
        return dict.fromkeys(names)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(folds):
        first, second = torch.randperm(N, generator=generator).to(labels_N.device).tensor_split(2)
        for fitted, held_out in ((first, second), (second, first)):
            temperature = fit_temperature(logits_NK[fitted], labels_N[fitted])
            log_p_NK = torch.log_softmax(logits_NK[held_out].double() / temperature, dim=1)
            rows.append([temperature, *(fn(log_p_NK, labels_N[held_out]) for fn in measure_fns.values())])
    return {name: mean_of_known(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _bin_sums(log_p_NK: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of inputs, sum of confidences and number of hits in each bin (lower, upper] of confidence."""
    top_N, predictions_N = log_p_NK.max(dim=1)
    confidence_N = top_N.exp()
    bins_N = torch.bucketize(confidence_N, _inner_edges(log_p_NK))
    weights = (torch.ones_like(confidence_N), confidence_N, (predictions_N == labels_N).double())
    count_R, confidence_R, correct_R = (torch.bincount(bins_N, weight_N, NUM_BINS) for weight_N in weights)
    return count_R, confidence_R, correct_R


def _inner_edges(like: Tensor) -> Tensor:
    return torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64, device=like.device)[1:-1]


def shared_among_equals(sorted_KN: Tensor, values_KN: Tensor) -> Tensor:
    """Average values over ties, so that an edge of a run that cuts through ties does not depend on the input order."""
    is_new_KN = pad(sorted_KN.diff(dim=1) != 0, (1, 0), value=True)
    group = is_new_KN.flatten().cumsum(dim=0) - 1
    mean = torch.bincount(group, values_KN.flatten()) / torch.bincount(group)
    return mean[group].view_as(values_KN)


def _slope_and_curvature(margins_NK: Tensor, inverse: float) -> tuple[float, float]:
    """Return d NLL / d inverse, and the derivative of this slope with respect to log(inverse)."""
    mean_N, variance_N = _moments_of_margins(margins_NK, inverse)
    return mean_N.mean().item(), inverse * variance_N.mean().item()


def _moments_of_margins(margins_NK: Tensor, inverse: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance over classes: the first two derivatives of each input's NLL in 1/T."""
    p_NK = torch.softmax(margins_NK * inverse, dim=1)
    mean_N = (p_NK * margins_NK).sum(dim=1)
    return mean_N, (p_NK * (margins_NK - mean_N[:, None]).square()).sum(dim=1)
