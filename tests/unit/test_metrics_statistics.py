"""Intervals against scipy, by their coverage, and the two forms of a measure against each other."""

import numpy as np
import pytest
import torch
from scipy import stats

from dicedist.metrics import accuracy, bootstrap, ece, nll, over_seeds, paired_over_seeds
from dicedist.metrics.measures import ENSEMBLE
from dicedist.metrics.statistics import Course, at_equal

PER_INPUT = [measure for measure in ENSEMBLE if measure.per_input is not None]


def predictions(N=400, K=5, seed=0, skill=2.0):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(K, (N,), generator=torch.Generator().manual_seed(99))
    logits_NK = torch.randn(N, K, generator=generator, dtype=torch.float64)
    logits_NK[torch.arange(N), labels_N] += skill
    return logits_NK.log_softmax(dim=1), labels_N


@pytest.mark.parametrize(("n", "level"), [(2, 0.95), (3, 0.9), (20, 0.99)])
def test_the_interval_over_seeds_is_scipys(n, level):
    values = np.random.default_rng(n).normal(70, 3, n)
    found = over_seeds(values.tolist(), level)
    expected = stats.t.interval(level, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.lower, found.upper) == pytest.approx(expected, rel=1e-12)
    assert (found.mean, found.deviation, found.n) == (
        pytest.approx(values.mean()),
        pytest.approx(values.std(ddof=1)),
        n,
    )


def test_pairs_are_scipys_paired_t():
    draw = np.random.default_rng(1)
    values = draw.normal(70, 3, 8)
    baseline = values - draw.normal(0.5, 0.2, 8)
    found = paired_over_seeds(values.tolist(), baseline.tolist())
    expected = stats.ttest_rel(values, baseline).confidence_interval(0.95)
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high), rel=1e-10)
    assert found.excludes_zero
    assert not over_seeds([-1.0, 1.0]).excludes_zero


def test_one_seed_has_no_interval():
    found = over_seeds([70.0])
    assert (found.mean, found.deviation, found.lower, found.upper) == (70.0, None, None, None)
    assert not found.excludes_zero


def test_what_cannot_be_said_is_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        over_seeds([])
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_over_seeds([1.0, 2.0], [1.0])
    log_p_NK, labels_N = predictions()
    with pytest.raises(ValueError, match="num_resamples"):
        bootstrap(accuracy, log_p_NK, labels_N, num_resamples=1)


@pytest.mark.parametrize("measure", PER_INPUT, ids=lambda measure: measure.name)
def test_the_fast_form_draws_and_gives_the_same(measure):
    log_p_NK, labels_N = predictions()
    baseline_NK, _ = predictions(seed=1)
    fast = bootstrap(measure.per_input, log_p_NK, labels_N, baseline_NK, num_resamples=150, seed=3)
    slow = bootstrap(measure.function, log_p_NK, labels_N, baseline_NK, num_resamples=150, seed=3)
    assert tuple(fast) == pytest.approx(tuple(slow), rel=1e-9, abs=1e-12)
    assert fast.mean == pytest.approx(measure.function(log_p_NK, labels_N) - measure.function(baseline_NK, labels_N))


def test_the_bootstrap_is_scipys():
    log_p_NK, labels_N = predictions()
    surprise_N = -log_p_NK.gather(1, labels_N[:, None]).squeeze(1).numpy()
    oracle = stats.bootstrap(
        (surprise_N,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0)
    )
    found = bootstrap(next(m.per_input for m in PER_INPUT if m.name == "nll"), log_p_NK, labels_N, num_resamples=20_000)
    assert found.mean == pytest.approx(nll(log_p_NK, labels_N))
    assert found.deviation == pytest.approx(oracle.standard_error, rel=0.03)
    width = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert found.lower == pytest.approx(oracle.confidence_interval.low, abs=0.03 * width)
    assert found.upper == pytest.approx(oracle.confidence_interval.high, abs=0.03 * width)


def test_a_measure_that_is_no_mean_equals_a_literal_loop():
    log_p_NK, labels_N = predictions(N=120)
    found = bootstrap(ece, log_p_NK, labels_N, num_resamples=30, seed=5)
    generator = torch.Generator().manual_seed(5)
    literal = []
    for _ in range(30):
        rows_N = torch.randint(120, (120,), generator=generator)
        literal.append(ece(log_p_NK[rows_N], labels_N[rows_N]))
    assert (found.lower, found.upper) == pytest.approx(tuple(np.quantile(literal, [0.025, 0.975])))


def test_pairing_narrows_the_interval_of_a_difference():
    log_p_NK, labels_N = predictions()
    noisy_NK = (log_p_NK + 0.05 * torch.randn(400, 5, generator=torch.Generator().manual_seed(2))).log_softmax(dim=1)
    per_input = next(m.per_input for m in PER_INPUT if m.name == "nll")
    alone = bootstrap(per_input, log_p_NK, labels_N)
    paired = bootstrap(per_input, log_p_NK, labels_N, noisy_NK)
    assert paired.upper - paired.lower < 0.2 * (alone.upper - alone.lower)


def test_a_curve_is_read_at_one_place():
    x_SP = torch.tensor([[50.0, 54, 58], [52, 56, 60], [51, 55, 59]], dtype=torch.float64)
    line = at_equal(Course(x_SP, 2 * x_SP), 56.0)
    assert line == pytest.approx((112, 0, 112, 112, 3), abs=1e-9)
    # A curve that turns back has one value at a place, not its highest: points are joined in the order of x.
    turning = Course(torch.tensor([[50.0, 58, 54]]), torch.tensor([[0.1, 0.2, 0.9]]))
    assert at_equal(turning, 56.0).mean == pytest.approx((0.9 + 0.2) / 2)
    assert at_equal(turning, 49.9) is None and at_equal(turning, 58.1) is None
    assert at_equal(Course(x_SP, x_SP), 50.5) is None, "too often outside, where seeds are resampled"


def test_the_interval_of_a_curve_resamples_seeds_and_pairs_them():
    draws = np.random.default_rng(0)
    shared = draws.normal(0, 0.05, (8, 1))
    x = np.array([50.0, 55, 60]) + draws.normal(0, 0.3, (8, 3))
    curves = [0.4 + level - 0.01 * (x - 55) + shared for level in (0.0, 0.1)]
    first, second = (Course(torch.from_numpy(x), torch.from_numpy(y)) for y in curves)
    rows = torch.randint(8, (2000, 8), generator=torch.Generator().manual_seed(0)).numpy()
    literal = [np.interp(54, x[row].mean(0), curves[0][row].mean(0)) for row in rows]
    alone, apart = at_equal(first, 54.0), at_equal(second, 54.0, first)
    assert (alone.lower, alone.upper) == pytest.approx(tuple(np.quantile(literal, [0.025, 0.975])))
    assert alone.upper - alone.lower > 0.03 and apart == pytest.approx((0.1, 0, 0.1, 0.1, 8), abs=1e-9)


def test_the_interval_covers_what_it_says():
    per_input = next(m.per_input for m in PER_INPUT if m.name == "nll")
    big_NK, big_N = predictions(N=200_000, seed=7)
    truth = nll(big_NK, big_N)
    found = [
        bootstrap(per_input, part_NK, part_N, num_resamples=300)
        for part_NK, part_N in zip(big_NK[:80_000].split(200), big_N[:80_000].split(200), strict=True)
    ]
    covered = sum(interval.lower <= truth <= interval.upper for interval in found) / len(found)
    assert 0.9 < covered < 0.98  # 95 % less what percentiles lose on 200 inputs, 400 times
