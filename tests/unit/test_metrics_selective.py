"""Abstention and the further calibration errors against scikit-learn, torchmetrics, closed forms and plain loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from dicedist.metrics import entropies, risk_coverage
from dicedist.metrics.calibration import NUM_BINS, adaptive_ece, classwise_ece, ece, mce
from dicedist.metrics.measures import FURTHER
from dicedist.metrics.selective import accuracy_at_coverage, augrc, aurc, e_aurc, errors_accepted


def random_case(N=400, K=6, scale=1.5, seed=0, decimals=None):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(K, (N,), generator=generator)
    logits_NK = torch.randn(N, K, generator=generator, dtype=torch.float64)
    logits_NK[torch.arange(N), labels_N] += 1
    if decimals is not None:
        logits_NK = logits_NK.round(decimals=decimals)
    return (scale * logits_NK).log_softmax(1), labels_N


def literal_risks(log_p_NK, labels_N):
    """The selective risk of the n most confident, for every n, without ties."""
    confidence, wrong = log_p_NK.max(1).values.tolist(), (log_p_NK.argmax(1) != labels_N).tolist()
    order = sorted(range(len(wrong)), key=lambda i: -confidence[i])
    return [sum(wrong[i] for i in order[:n]) / n for n in range(1, len(order) + 1)]


def test_areas_equal_a_plain_loop():
    log_p_NK, labels_N = random_case()
    risks = literal_risks(log_p_NK, labels_N)
    N, wrong = len(risks), round(risks[-1] * len(risks))
    best = [max(0, n - (N - wrong)) / n for n in range(1, N + 1)]
    assert aurc(log_p_NK, labels_N) == pytest.approx(sum(risks) / N, rel=1e-12)
    assert e_aurc(log_p_NK, labels_N) == pytest.approx((sum(risks) - sum(best)) / N, rel=1e-9)
    assert accuracy_at_coverage(log_p_NK, labels_N) == pytest.approx(1 - risks[359], rel=1e-12)


def test_ties_give_the_mean_over_orders():
    log_p_NK, labels_N = random_case(N=60, decimals=0)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(60, generator=generator) for _ in range(3000)]
    drawn = [sum(literal_risks(log_p_NK[order], labels_N[order])) / 60 for order in orders]
    assert aurc(log_p_NK, labels_N) == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / math.sqrt(3000))


@pytest.mark.parametrize("decimals", [None, 0])
def test_augrc_equals_its_closed_form(decimals):
    """(1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2, with the AUROC of confidence (Traub et al., 2024)."""
    log_p_NK, labels_N = random_case(decimals=decimals)
    right = (log_p_NK.argmax(1) == labels_N).numpy()
    auroc, accuracy = roc_auc_score(right, log_p_NK.max(1).values), right.mean()
    expected = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert augrc(log_p_NK, labels_N) == pytest.approx(expected, rel=1e-12)


def test_errors_accepted_equals_scikit_learn():
    log_p_NK, labels_N = random_case()
    fpr, tpr, _ = roc_curve(log_p_NK.argmax(1) == labels_N, log_p_NK.max(1).values, drop_intermediate=False)
    assert errors_accepted(log_p_NK, labels_N) == pytest.approx(fpr[np.argmax(tpr >= 0.95)], rel=1e-12)
    assert errors_accepted(log_p_NK, log_p_NK.argmax(1)) is None


def test_a_perfect_order_has_no_excess():
    p_N = torch.linspace(0.6, 0.99, 20, dtype=torch.float64)
    log_p_NK = torch.stack([p_N, 1 - p_N], 1).log()
    labels_N = (torch.arange(20) < 5).long()  # the five least confident are wrong
    assert e_aurc(log_p_NK, labels_N) == pytest.approx(0, abs=1e-15)
    curve = risk_coverage(log_p_NK, labels_N)
    assert curve["coverage"][-1] == 1 and curve["risk"][-1] == 0.25 and curve["risk"][14] == 0


def test_mce_equals_torchmetrics():
    oracle = pytest.importorskip("torchmetrics.functional.classification")
    log_p_NK, labels_N = random_case(N=3000)
    expected = oracle.multiclass_calibration_error(log_p_NK.exp(), labels_N, num_classes=6, n_bins=15, norm="max")
    assert mce(log_p_NK, labels_N) == pytest.approx(expected.item(), abs=1e-6)


def test_classwise_ece_equals_a_plain_loop():
    log_p_NK, labels_N = random_case(N=500, K=4)
    p_NK, total = log_p_NK.exp(), 0.0
    for k in range(4):
        for r in range(NUM_BINS):
            inside = (p_NK[:, k] > r / NUM_BINS) & (p_NK[:, k] <= (r + 1) / NUM_BINS)
            total += abs((p_NK[inside, k] - (labels_N[inside] == k).double()).sum().item()) / 500 / 4
    assert classwise_ece(log_p_NK, labels_N) == pytest.approx(total, rel=1e-10)


def test_classwise_ece_of_two_classes_sees_both_sides():
    """With two classes both have the same gaps, mirrored; all confidences in one bin leave a single gap."""
    log_p_NK = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log().repeat(10, 1)
    labels_N = torch.tensor([0] * 6 + [1] * 4)
    assert classwise_ece(log_p_NK, labels_N) == pytest.approx(0.3)
    assert ece(log_p_NK, labels_N) == pytest.approx(0.3)


def test_adaptive_ece_equals_a_plain_loop():
    log_p_NK, labels_N = random_case(N=307)
    confidence, order = log_p_NK.max(1).values.exp().sort()
    right = (log_p_NK.argmax(1) == labels_N)[order].double()
    bins = np.array_split(np.arange(307), NUM_BINS)
    expected = sum(len(b) / 307 * abs(confidence[b].mean() - right[b].mean()).item() for b in bins)
    assert adaptive_ece(log_p_NK, labels_N) == pytest.approx(expected, rel=1e-10)


def test_entropies_by_hand():
    """Two sure members that contradict each other disagree by log 2; two unsure ones that agree, by nothing."""
    sure = 100 * torch.eye(2)
    contradicting = torch.stack([sure[[0, 0]], sure[[1, 0]]])
    found = entropies(contradicting)
    assert found["mutual_information"].tolist() == pytest.approx([math.log(2), 0], abs=1e-12)
    agreeing = entropies(torch.zeros(3, 1, 4))
    assert agreeing["expected_entropy"].item() == pytest.approx(math.log(4))
    assert agreeing["mutual_information"].item() == pytest.approx(0, abs=1e-12)


def test_entropies_equal_scipy():
    from scipy.stats import entropy

    logits_MNK = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))
    p_MNK, found = logits_MNK.double().softmax(2).numpy(), entropies(logits_MNK)
    assert found["predictive_entropy"].numpy() == pytest.approx(entropy(p_MNK.mean(0), axis=1))
    assert found["expected_entropy"].numpy() == pytest.approx(entropy(p_MNK, axis=2).mean(0))
    assert found["mutual_information"].numpy() == pytest.approx(
        entropy(p_MNK.mean(0), axis=1) - entropy(p_MNK, axis=2).mean(0)
    )


def test_every_further_measure_survives_one_input():
    log_p_NK, labels_N = random_case(N=1)
    for measure in FURTHER:
        value = measure.function(log_p_NK, labels_N)
        assert value is None or math.isfinite(value), measure.name
