"""Calibration by hand, against torchmetrics and scipy, and against slow literal readings of the definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from dicedist.metrics import (
    accuracy,
    ece,
    fit_temperature,
    nll,
    reliability,
    split_half,
    tace,
    temperature_spread,
)


def random_logits(N=400, K=10, seed=0, scale=2.0):
    """Labels are drawn from the softmax of the logits, which are then scaled: the best T is near `scale`."""
    generator = torch.Generator().manual_seed(seed)
    logits_NK = 1.5 * torch.randn(N, K, generator=generator, dtype=torch.float64)
    labels_N = torch.multinomial(logits_NK.softmax(dim=1), 1, generator=generator)[:, 0]
    return scale * logits_NK, labels_N


def two_class_log_p(*confidences):
    """Log-probabilities of inputs that predict class 0 with these confidences, exact where exp(log(c)) is."""
    p_N = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack((p_N, 1 - p_N), dim=1).log()


def literal_tace(log_p_NK, labels_N):
    p, y = log_p_NK.exp().tolist(), labels_N.tolist()
    N, K = len(p), len(p[0])
    total = 0.0
    for k in range(K):
        kept = [(row[k], label == k) for row, label in sorted(zip(p, y, strict=True), key=lambda item: item[0][k])]
        kept = [(probability, hit) for probability, hit in kept if probability > 1e-3]
        size = len(kept) // 15
        runs = [kept[r * size : (r + 1) * size] for r in range(14)] + [kept[14 * size :]]
        for run in runs:
            if run:
                mean_p = sum(probability for probability, _ in run) / len(run)
                mean_hit = sum(hit for _, hit in run) / len(run)
                total += len(run) / (N * K) * abs(mean_p - mean_hit)
    return total


def literal_split_half(logits_NK, labels_N, seed, folds):
    """Accuracy and NLL, with the temperature found by scipy."""
    generator = torch.Generator().manual_seed(seed)
    accuracies, nlls = [], []
    for _ in range(folds):
        order = torch.randperm(len(labels_N), generator=generator).tolist()
        middle = (len(order) + 1) // 2
        for fitted, held_out in ((order[:middle], order[middle:]), (order[middle:], order[:middle])):
            T = scipy_temperature(logits_NK[fitted], labels_N[fitted])
            right, surprise = 0, 0.0
            for n in held_out:
                row, label = (logits_NK[n] / T).tolist(), int(labels_N[n])
                right += row.index(max(row)) == label
                surprise += math.log(sum(math.exp(z) for z in row)) - row[label]
            accuracies.append(right / len(held_out))
            nlls.append(surprise / len(held_out))
    return {"accuracy": sum(accuracies) / len(accuracies), "nll": sum(nlls) / len(nlls)}


def nll_at(logits_NK, labels_N, T):
    return nll((logits_NK / T).log_softmax(dim=1), labels_N)


def scipy_temperature(logits_NK, labels_N):
    found = minimize_scalar(lambda log_T: nll_at(logits_NK, labels_N, math.exp(log_T)), (-0.5, 0.5), tol=1e-10)
    return math.exp(found.x)


@pytest.mark.parametrize("seed", range(3))
def test_ece_equals_netcal(seed):
    reason = "netcal brings gpytorch, pyro and tensorboard, so it is not among the test packages: pip install netcal"
    netcal = pytest.importorskip("netcal.metrics", reason=reason)
    logits_NK, labels_N = random_logits(N=2000, seed=seed)
    theirs = netcal.ECE(bins=15).measure(logits_NK.softmax(1).numpy(), labels_N.numpy())
    assert ece(logits_NK.log_softmax(1), labels_N) == pytest.approx(theirs, abs=1e-12)


def test_ece_by_hand():
    log_p_NK = two_class_log_p(0.85, 0.83, 0.95)
    # Bins (0.8, 13/15] and (14/15, 1]: |1.68 - 1| and |0.95 - 1|, over three inputs.
    assert ece(log_p_NK, torch.tensor([0, 1, 0])) == pytest.approx((0.68 + 0.05) / 3)


def test_bins_are_open_below_and_closed_above():
    edges = torch.linspace(0, 1, 16, dtype=torch.float64)[8:]
    edges = edges[edges.log().exp() == edges]  # only those that exp(log(edge)) returns bit for bit
    assert len(edges) > 2
    for edge in edges.tolist():
        (bin_,) = (b for b in reliability(two_class_log_p(edge), torch.tensor([0])) if b["count"])
        assert bin_["upper"] == pytest.approx(edge)
        if edge < 1:
            (bin_,) = (b for b in reliability(two_class_log_p(edge + 1e-12), torch.tensor([0])) if b["count"])
            assert bin_["lower"] == pytest.approx(edge)


def test_confidence_one_is_in_the_last_bin():
    log_p_NK = torch.tensor([[1e4, 0.0], [3.5, 0.0]], dtype=torch.float64).log_softmax(dim=1)
    assert [b["count"] for b in reliability(log_p_NK, torch.tensor([0, 0]))] == [0] * 14 + [2]


def test_reliability_holds_what_ece_sums():
    logits_NK, labels_N = random_logits()
    bins = reliability(logits_NK.log_softmax(dim=1), labels_N)
    assert sum(b["count"] for b in bins) == len(labels_N)
    assert all((b["confidence"] is None) == (b["count"] == 0) == (b["accuracy"] is None) for b in bins)
    assert all(b["lower"] < b["confidence"] <= b["upper"] for b in bins if b["count"])
    gaps = [b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins if b["count"]]
    assert sum(gaps) / len(labels_N) == pytest.approx(ece(logits_NK.log_softmax(dim=1), labels_N))


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_ece_equals_torchmetrics(scale):
    reason = "torchmetrics, an oracle of the calibration error, is not installed"
    oracle = pytest.importorskip("torchmetrics.functional.classification", reason=reason)
    logits_NK, labels_N = random_logits(N=5000, K=20, scale=scale)
    log_p_NK = logits_NK.log_softmax(dim=1)
    assert log_p_NK.exp().max() < 1  # torchmetrics puts a confidence of exactly 1 in a bin of its own
    expected = oracle.multiclass_calibration_error(log_p_NK.exp(), labels_N, num_classes=20, n_bins=15, norm="l1")
    assert ece(log_p_NK, labels_N) == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(("N", "K", "scale"), [(1, 3, 1), (14, 2, 1), (31, 5, 3), (300, 100, 4), (1000, 10, 0.5)])
def test_tace_equals_a_literal_reading(N, K, scale):
    logits_NK, labels_N = random_logits(N, K, seed=N, scale=scale)
    logits_NK[:, 0] -= 50  # a class that is never kept
    log_p_NK = logits_NK.log_softmax(dim=1)
    assert tace(log_p_NK, labels_N) == pytest.approx(literal_tace(log_p_NK, labels_N), rel=1e-11)


def test_tace_by_hand():
    # Class 0: fifteen runs of one input. Class 1: two inputs are below the threshold, the other 13 are one run.
    p_N = torch.cat([torch.linspace(0.2, 0.8, 13, dtype=torch.float64), torch.tensor([0.9995, 0.9999]).double()])
    log_p_NK = torch.stack((p_N, 1 - p_N), dim=1).log()
    labels_N = torch.zeros(15, dtype=torch.int64)
    class_0, class_1 = (1 - p_N).sum().item(), (1 - p_N[:13]).sum().item()
    assert tace(log_p_NK, labels_N) == pytest.approx((class_0 + class_1) / 30)


def test_tace_of_a_constant_prediction_at_the_base_rate_is_zero():
    labels_N = torch.arange(4).repeat_interleave(30)  # sorted by class: ties must not be cut in input order
    assert tace(torch.full((120, 4), 0.25, dtype=torch.float64).log(), labels_N) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 20.0])
def test_temperature_equals_scipy(scale):
    logits_NK, labels_N = random_logits(scale=scale)
    T = fit_temperature(logits_NK, labels_N)
    assert pytest.approx(scale, rel=0.2) == T
    assert pytest.approx(scipy_temperature(logits_NK, labels_N), rel=1e-6) == T


def test_temperature_scales_with_the_logits():
    logits_NK, labels_N = random_logits(scale=1.0)
    T = fit_temperature(logits_NK, labels_N)
    assert fit_temperature(1e4 * logits_NK, labels_N) == pytest.approx(1e4 * T, rel=1e-8)


def test_temperature_by_hand():
    # Logit 1 for the right class in three of four inputs: the best p is 3/4, so 1/T = log(3).
    logits_NK = torch.tensor([[1.0, 0.0]] * 4)
    assert fit_temperature(logits_NK, torch.tensor([0, 0, 0, 1])) == pytest.approx(1 / math.log(3), rel=1e-9)


def test_temperature_stays_in_its_range():
    logits_NK = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits_NK, torch.tensor([0, 1])) == 1.0  # no error: nothing says how cold
    assert fit_temperature(logits_NK, torch.tensor([1, 0])) == pytest.approx(1e6)  # all wrong: as hot as allowed
    assert fit_temperature(torch.full((5, 3), 0.1), torch.tensor([0, 1, 2, 0, 1])) == 1.0  # constant: T is free


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    N=st.integers(1, 12),
    K=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
)
def test_temperature_never_raises_the_fitted_nll(seed, N, K, scale):
    generator = torch.Generator().manual_seed(seed)
    logits_NK = scale * torch.randn(N, K, generator=generator, dtype=torch.float64)
    labels_N = torch.randint(K, (N,), generator=generator)
    T = fit_temperature(logits_NK, labels_N)
    assert 0.009 < T < 1.1e6
    tempered, plain = nll_at(logits_NK, labels_N, T), nll_at(logits_NK, labels_N, 1.0)
    assert tempered <= plain * (1 + 1e-12)


def test_the_spread_of_the_temperature_is_that_of_many_fits():
    logits_NK, labels_N = random_logits(N=20_000)
    parts = zip(logits_NK.split(200), labels_N.split(200), strict=True)
    fits = [(T := fit_temperature(*part), temperature_spread(*part, T)) for part in parts]
    temperatures, spreads = torch.tensor(fits).T
    assert spreads.mean().item() == pytest.approx(1.96 * temperatures.std().item(), rel=0.2)


def test_a_temperature_without_a_minimum_has_no_spread():
    logits_NK, labels_N = torch.eye(3, dtype=torch.float64), torch.arange(3)
    assert temperature_spread(logits_NK, labels_N, fit_temperature(logits_NK, labels_N)) is None
    hottest = fit_temperature(-logits_NK, labels_N)
    assert temperature_spread(-logits_NK, labels_N, hottest) is None


@pytest.mark.parametrize(("N", "folds"), [(60, 1), (61, 3)])
def test_split_half_equals_a_literal_reading(N, folds):
    logits_NK, labels_N = random_logits(N, K=4)
    found = split_half(logits_NK, labels_N, {"accuracy": accuracy, "nll": nll}, seed=5, folds=folds)
    expected = literal_split_half(logits_NK, labels_N, seed=5, folds=folds)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-12)
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-7)
    assert 1 < found["temperature"] < 4


def test_split_half_of_one_input_has_no_value():
    logits_NK, labels_N = random_logits(N=1)
    assert split_half(logits_NK, labels_N, {"nll": nll}) == {"temperature": None, "nll": None}


def test_split_half_needs_a_fold():
    with pytest.raises(ValueError, match="folds.*at least 1: got 0"):
        split_half(*random_logits(), {"nll": nll}, folds=0)
