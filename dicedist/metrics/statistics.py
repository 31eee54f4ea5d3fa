"""Uncertainty of figures: intervals over seeds (Student's t) and over inputs (bootstrap), plain or paired.

Shapes: N inputs, K classes, R resamples (B at a time), S seeds, P points of a curve. Differences are value - baseline.
Intervals over seeds show the variation of training, intervals over inputs the variation of the test set.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

RESAMPLES_AT_ONCE = 64

InputMeasure = Callable[[Tensor, Tensor], Tensor | float]


class Interval(NamedTuple):
    mean: float  # over seeds; for a bootstrap the value on the original inputs
    deviation: float | None  # over seeds; for a bootstrap the standard error
    lower: float | None
    upper: float | None
    n: int  # seeds or inputs

    def times(self, scale: float) -> "Interval":
        deviation, lower, upper = (None if v is None else scale * v for v in (self.deviation, self.lower, self.upper))
        return Interval(scale * self.mean, deviation, lower, upper, self.n)

    @property
    def excludes_zero(self) -> bool:
        """Return whether the interval is known and does not contain 0."""
        return self.lower is not None and self.upper is not None and not self.lower <= 0 <= self.upper


def over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return mean, standard deviation and t interval of one value per seed. One seed has only a mean."""
    if not values:
        raise ValueError("an interval over seeds needs the value of at least one seed")
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Interval(mean, None, None, None, 1)
    deviation = statistics.stdev(values)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * deviation / math.sqrt(n)
    return Interval(mean, deviation, mean - half, mean + half, n)


def paired_over_seeds(values: Sequence[float], baseline: Sequence[float], level: float = 0.95) -> Interval:
    """Return the t interval of the differences per seed. Effects of a seed on both sides cancel."""
    if len(values) != len(baseline):
        raise ValueError(f"pairs need the same seeds on both sides: got {len(values)} and {len(baseline)} values")
    return over_seeds([value - other for value, other in zip(values, baseline, strict=True)], level)


def bootstrap(
    measure: InputMeasure,
    log_p_NK: Tensor,
    labels_N: Tensor,
    baseline_NK: Tensor | None = None,
    num_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return the percentile interval of a measure over resampled inputs, or of its difference from `baseline_NK`.

    A measure with one value per input is averaged over many resamples at once. Any other is called for each resample.
    Equal seeds draw equal inputs, so intervals of several measures or methods are comparable.
    """
    if num_resamples < 2:
        raise ValueError(f"num_resamples, the number of draws of all inputs, must be at least 2: got {num_resamples}")
    sides = [log_p_NK] if baseline_NK is None else [log_p_NK, baseline_NK]
    whole = [measure(side_NK, labels_N) for side_NK in sides]
    generator = torch.Generator().manual_seed(seed)
    if isinstance(whole[0], Tensor):
        values_N = _difference(whole)
        value, drawn_R = values_N.mean().item(), _resampled_means(values_N, num_resamples, generator)
    else:
        value = float(_difference(whole))
        rows = (_draw(1, len(labels_N), generator)[0].to(labels_N.device) for _ in range(num_resamples))
        drawn = [_difference([measure(side_NK[row_N], labels_N[row_N]) for side_NK in sides]) for row_N in rows]
        drawn_R = torch.tensor(drawn, dtype=torch.float64)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    lower, upper = torch.quantile(drawn_R, tails).tolist()
    return Interval(value, drawn_R.std().item(), lower, upper, len(labels_N))


class Course(NamedTuple):
    """A curve of two measures. Each point is a setting, with one value per seed."""

    x_SP: Tensor
    y_SP: Tensor

    def at(self, place: float, seeds_RS: Tensor) -> Tensor:
        """Return y_R on the curve through the means of these seeds, linear between points; NaN outside."""
        x_RP, order_RP = self.x_SP[seeds_RS].mean(1).sort(1)
        y_RP = self.y_SP[seeds_RS].mean(1).gather(1, order_RP)
        right_R1 = (x_RP < place).sum(1, keepdim=True).clamp(1, x_RP.shape[1] - 1)
        low_R1, high_R1 = x_RP.gather(1, right_R1 - 1), x_RP.gather(1, right_R1)
        share_R1 = (place - low_R1) / (high_R1 - low_R1).clamp_min(1e-12)
        y_R1 = y_RP.gather(1, right_R1 - 1).lerp(y_RP.gather(1, right_R1), share_R1)
        outside_R1 = (share_R1 < 0) | (share_R1 > 1)
        return y_R1.masked_fill(outside_R1, math.nan)[:, 0]


def at_equal(
    course: Course, place: float, baseline: Course | None = None, num_resamples: int = 2000, level: float = 0.95
) -> Interval | None:
    """Return y at x = `place`, or its difference from a baseline, with a percentile interval over resampled seeds.

    The baseline has the same seeds, and shares the resamples. None if the place lies outside a curve in more than 1 of
    20 resamples. With few seeds the interval is too narrow: five seeds have 126 different resamples, three have 10.
    """
    sides = [course] if baseline is None else [course, baseline]
    num_seeds = len(course.x_SP)
    drawn_RS = _draw(num_resamples, num_seeds, torch.Generator().manual_seed(0))
    whole_R, resampled_R = (
        _difference([side.at(place, seeds_RS) for side in sides])
        for seeds_RS in (torch.arange(num_seeds)[None], drawn_RS)
    )
    known_R = resampled_R[~resampled_R.isnan()]
    if whole_R.isnan().any() or len(known_R) < 0.95 * num_resamples:
        return None
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    lower, upper = torch.quantile(known_R, tails).tolist()
    return Interval(whole_R.item(), known_R.std().item(), lower, upper, num_seeds)


def _difference(sides: Sequence[Tensor | float]) -> Tensor:
    value, *baseline = (torch.as_tensor(side, dtype=torch.float64) for side in sides)
    return value - baseline[0] if baseline else value


def _draw(num_resamples: int, N: int, generator: torch.Generator) -> Tensor:
    return torch.randint(N, (num_resamples, N), generator=generator)


def _resampled_means(values_N: Tensor, num_resamples: int, generator: torch.Generator) -> Tensor:
    """Return the mean of the values over each resample. The draws equal those of one resample at a time."""
    N, means = len(values_N), []
    for first in range(0, num_resamples, RESAMPLES_AT_ONCE):
        rows_BN = _draw(min(RESAMPLES_AT_ONCE, num_resamples - first), N, generator).to(values_N.device)
        means.append(values_N[rows_BN].mean(dim=1))
    return torch.cat(means).cpu()
