"""Scores on features against plain numpy and scikit-learn; both conventions of FPR95; the bootstrap of the AUROC."""

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.neighbors import NearestNeighbors

from dicedist.algorithm.counterpart import Features
from dicedist.evaluation.detection import Scorer, detect
from dicedist.evaluation.readings import Collected
from dicedist.metrics import ood
from dicedist.metrics.features import LARGEST_BANK, Reference, bank_of, bank_size, knn
from dicedist.metrics.ood import auroc_resamples, percentiles


def drawn(*shape, seed=0, shift=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + shift


@pytest.fixture(scope="module")
def reference():
    labels_R = torch.arange(300) % 4
    features_MRD = drawn(3, 300, 6) + labels_R[None, :, None]
    return Reference.of(features_MRD, labels_R, 5), features_MRD, labels_R  # a fifth class has no images


@pytest.mark.parametrize(("size", "nth"), [(300, 2), (100, 1), (2000, 10)])
def test_knn_equals_scikit_learn(size, nth):
    """One in 200 of the bank is nearer; the bank is in half precision."""
    features_MRD, new_MND = drawn(3, size, 6), drawn(3, 40, 6, seed=1)

    def together(features):
        directions = features / features.norm(dim=2, keepdim=True)
        return np.concatenate([member.numpy() for member in directions], axis=1)

    oracle = NearestNeighbors(n_neighbors=nth).fit(together(features_MRD))
    distances = oracle.kneighbors(together(new_MND))[0][:, -1] / np.sqrt(3)
    found = knn(bank_of(features_MRD), new_MND)
    assert found.numpy() == pytest.approx(1 - distances / 2, abs=1e-3)
    assert 0 <= found.min() and found.max() <= 1


def test_a_bank_is_small_whatever_the_members():
    for members, width in ((4, 64), (4, 2048), (100, 768), (1000, 10**6)):
        size = bank_size(members, width)
        assert 1 <= size <= 2000 and (size == 1 or 2 * size * members * width <= LARGEST_BANK)
    assert bank_size(4, 64) == 2000 and bank_of(drawn(4, 5, 64)).nbytes == 2 * 4 * 5 * 64


def test_mahalanobis_equals_plain_numpy(reference):
    found, features_MRD, labels_R = reference
    new_MND = drawn(3, 40, 6, seed=1)
    expected = np.zeros(40)
    for member, new in zip(features_MRD.numpy().astype(float), new_MND.numpy().astype(float), strict=True):
        means = np.stack([member[labels_R.numpy() == k].mean(0) for k in range(4)])
        within = EmpiricalCovariance(assume_centered=True).fit(member - means[labels_R.numpy()])
        distances = [np.einsum("nd,de,ne->n", new - mean, within.precision_, new - mean) for mean in means]
        expected += np.min(distances, axis=0) / 3
    assert -found.mahalanobis(new_MND).numpy() == pytest.approx(expected, rel=1e-6)


def test_a_feature_that_never_varies_does_not_count():
    features_MRD = drawn(1, 100, 3)
    features_MRD[..., 2] = 0  # as where members of other widths are padded
    found = Reference.of(features_MRD, torch.arange(100) % 2, 2)
    apart = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, 50.0]]])
    near, far = found.mahalanobis(apart).tolist()
    assert near == pytest.approx(far)


def test_both_conventions_of_fpr95_equal_scikit_learn():
    inside, outside = drawn(400, seed=2, shift=1.0), drawn(300, seed=3)
    found = ood(inside, outside)
    scores, is_in = np.concatenate([inside, outside]), np.repeat([1, 0], [400, 300])
    for name, positive, score in (("fpr95", is_in, scores), ("fpr95_ood_positive", 1 - is_in, -scores)):
        fpr, tpr, _ = roc_curve(positive, score, drop_intermediate=False)
        assert found[name] == pytest.approx(fpr[np.argmax(tpr >= 0.95)]), name
    assert found["fpr95"] != found["fpr95_ood_positive"]


def test_resampled_auroc_equals_resampling_by_hand():
    inside, outside = drawn(60, seed=4, shift=1.0).round(decimals=1), drawn(50, seed=5).round(decimals=1)
    found = auroc_resamples(inside, outside)
    rows_in, rows_out = (
        torch.randint(n, (25, n), generator=torch.Generator().manual_seed(seed)) for seed, n in ((0, 60), (1, 50))
    )
    for nth in range(25):
        scores = np.concatenate([inside[rows_in[nth]], outside[rows_out[nth]]])
        assert found[nth].item() == pytest.approx(roc_auc_score(np.repeat([1, 0], [60, 50]), scores)), nth
    low, high = percentiles(found)
    assert low < ood(inside, outside)["auroc"] < high


def seen(seed, score, shift=0.0, M=3, N=80, K=4):
    """The logits of some inputs, and what the scorer sees of their features."""
    logits_MNK = drawn(M, N, K, seed=seed, shift=shift)
    looked = score.feature_scores(logits_MNK, drawn(M, N, 6, seed=seed + 1, shift=shift))
    return Collected(logits_MNK, looked, Features(torch.empty(M, 0, 6), torch.empty(M, 0, 6)))


def test_scores_by_plain_numpy(reference):
    score = Scorer("logits", lambda means_MND, labels_N: torch.full((80,), 0.5), None, reference[0])
    collected = seen(7, score)
    found = score(collected)
    logits = collected.logits_MNK.numpy().astype(float)
    mean = logits.mean(0)
    assert found["energy"].numpy() == pytest.approx(np.log(np.exp(mean).sum(1)))
    assert found["max_logit"].numpy() == pytest.approx(mean.max(1))
    p = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    assert found["entropy"].numpy() == pytest.approx((p.mean(0) * np.log(p.mean(0))).sum(1))
    halved = np.exp(mean / 2) / np.exp(mean / 2).sum(1, keepdims=True)
    assert found["dice_x_w"].numpy() == pytest.approx(halved.max(1))
    assert "knn" not in found and "mahalanobis" in found


def exact_deviation(inside, outsides):
    """The standard deviation of the mean AUROC over sets under the bootstrap, without drawing anything.

    Inputs are drawn c times, c multinomial with mean 1 and covariance I - 1/n. The mean AUROC is a bilinear form in the
    counts of both sides, so its variance has a closed form: a term of each side and one of both.
    """

    def covariance(n):
        return np.eye(n) - 1 / n

    n, S = len(inside), len(outsides)
    wins = [((inside[:, None] > out) + 0.5 * (inside[:, None] == out)) / (n * len(out) * S) for out in outsides]
    of_inside = sum(win.sum(1) for win in wins)
    variance = of_inside @ covariance(n) @ of_inside
    for win, out in zip(wins, outsides, strict=True):
        spread = covariance(len(out))
        variance += win.sum(0) @ spread @ win.sum(0) + np.trace(win.T @ covariance(n) @ win @ spread)
    return variance**0.5


def test_the_interval_of_a_group_has_its_exact_width(monkeypatch):
    """Sets of different sizes share the resampled test images, so their errors add up instead of averaging out."""
    monkeypatch.setitem(auroc_resamples.__globals__, "RESAMPLES", 4000)
    inside = drawn(40, seed=4, shift=0.8)
    outside = {name: {"s": drawn(n, seed=n)} for name, n in (("a", 300), ("b", 200), ("c", 250))}
    group = detect({"s": inside}, outside, {"all": list(outside)})["ood_groups"]["all"]["scores"]["s"]
    deviation = exact_deviation(inside.numpy(), [scores["s"].numpy() for scores in outside.values()])
    low, high = group["auroc_interval"]
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.05)


def test_sets_of_equal_size_are_drawn_independently():
    inside, outside = drawn(40, seed=4), drawn(40, seed=5)
    assert not auroc_resamples(inside, outside, "a").equal(auroc_resamples(inside, outside, "b"))


def test_groups_average_the_sets_that_were_found(reference):
    score = Scorer("logits", None, bank_of(reference[1]), reference[0])
    inside, outside = score(seen(7, score)), {"a": score(seen(20, score, 0.2)), "b": score(seen(30, score, 0.4))}
    found = detect(inside, outside, {"near": ["a", "absent"], "far": ["b"], "none": ["absent"]})
    assert found["ood_groups"].keys() == {"near", "far"}
    assert found["ood_groups"]["near"]["missing"] == ["absent"]
    every = detect(inside, outside, {"all": ["a", "b"]})["ood_groups"]["all"]["scores"]["knn"]
    assert every["auroc"] == pytest.approx((found["ood"]["a"]["knn"]["auroc"] + found["ood"]["b"]["knn"]["auroc"]) / 2)
    assert every["auroc_interval"][0] < every["auroc"] < every["auroc_interval"][1]
    low, high = found["ood"]["a"]["energy"]["range"]
    assert low < 0 or high > 1
    assert [sum(side) for side in found["ood"]["a"]["energy"]["histogram"]] == pytest.approx([1, 1])
