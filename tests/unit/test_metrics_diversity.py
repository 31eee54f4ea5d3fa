"""Diversity by hand, against DESlib, and against a literal count over members and inputs."""

import math
from itertools import combinations

import pytest
import torch

from dicedist.metrics import diversity, pairwise


def random_predictions(M=5, N=300, K=4, accuracy=0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(K, (N,), generator=generator)
    guesses_MN = torch.randint(K, (M, N), generator=generator)
    knows_MN = torch.rand(M, N, generator=generator) < accuracy
    return torch.where(knows_MN, labels_N, guesses_MN), labels_N


def test_by_hand():
    predictions_MN = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 1, 0, 1, 1]])
    labels_N = torch.zeros(6, dtype=torch.int64)
    # Both right 2, first only 1, second only 1, both wrong 2 (once with the same class).
    assert diversity(predictions_MN, labels_N) == pytest.approx(
        {
            "ratio_error": 2 / 2,
            "q_statistic": (2 * 2 - 1 * 1) / (2 * 2 + 1 * 1),
            "agreement": 3 / 6,
            "agreement_oracle": 4 / 6,
            "kohavi_wolpert": 2 * 1 / 4 / 6,
            "entropy": 2 / 6,
        }
    )


def test_three_members_by_hand():
    predictions_MN = torch.tensor([[0, 0], [0, 1], [0, 1]])
    measures = diversity(predictions_MN, torch.tensor([0, 0]))
    assert measures["kohavi_wolpert"] == pytest.approx(1 * 2 / 9 / 2)
    assert measures["entropy"] == pytest.approx(1 / 2)  # M - ceil(M/2) = 1
    assert measures["ratio_error"] == 0.0  # only members 1 and 2, which err together, have a shared error


def test_pairs_equal_deslib():
    oracle = pytest.importorskip("deslib.util.diversity", reason="DESlib, an oracle of diversity, is not installed")
    predictions_MN, labels_N = random_predictions()
    y = labels_N.numpy()
    rows = pairwise(predictions_MN, labels_N)
    assert [row["members"] for row in rows] == [list(pair) for pair in combinations(range(5), 2)]
    for row in rows:
        first, second = (predictions_MN[i].numpy() for i in row["members"])
        assert row["ratio_error"] == pytest.approx(oracle.ratio_errors(y, first, second), rel=1e-12)
        assert row["q_statistic"] == pytest.approx(oracle.Q_statistic(y, first, second), rel=1e-12)
        assert row["agreement_oracle"] == pytest.approx(oracle.agreement_measure(y, first, second), rel=1e-12)
        assert row["agreement"] == pytest.approx((first == second).mean(), rel=1e-15)


@pytest.mark.parametrize("M", [2, 3, 6])
def test_equals_a_literal_count(M):
    predictions_MN, labels_N = random_predictions(M)
    predictions, labels = predictions_MN.tolist(), labels_N.tolist()
    N = len(labels)
    variance = entropy = 0.0
    for n in range(N):
        right = sum(member[n] == labels[n] for member in predictions)
        variance += right * (M - right) / M**2 / N
        entropy += min(right, M - right) / (M - math.ceil(M / 2)) / N
    rows = pairwise(predictions_MN, labels_N)
    expected = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name != "members"}
    expected |= {"kohavi_wolpert": variance, "entropy": entropy}
    assert diversity(predictions_MN, labels_N) == pytest.approx(expected, rel=1e-12)


def test_kohavi_wolpert_is_disagreement_scaled():
    # Kuncheva and Whitaker 2003, equation 17: KW = (M - 1)/(2M) * mean pairwise disagreement.
    for M in (2, 3, 7):
        measures = diversity(*random_predictions(M))
        expected = (M - 1) / (2 * M) * (1 - measures["agreement_oracle"])
        assert measures["kohavi_wolpert"] == pytest.approx(expected, rel=1e-12)


def test_one_member_has_no_diversity():
    predictions_MN, labels_N = random_predictions(M=1)
    assert set(diversity(predictions_MN, labels_N).values()) == {None}
    assert pairwise(predictions_MN, labels_N) == []


def test_identical_members_do_not_disagree():
    predictions_MN, labels_N = random_predictions(M=1)
    assert diversity(predictions_MN.expand(4, -1), labels_N) == {
        "ratio_error": 0.0,
        "q_statistic": 1.0,
        "agreement": 1.0,
        "agreement_oracle": 1.0,
        "kohavi_wolpert": 0.0,
        "entropy": 0.0,
    }


def test_zero_denominators_are_none():
    labels_N = torch.tensor([0, 1, 0])
    all_right = diversity(labels_N.expand(3, -1), labels_N)
    assert all_right["ratio_error"] is None and all_right["q_statistic"] is None
    assert all_right["agreement"] == 1.0


def test_a_pair_without_value_is_left_out_of_the_mean():
    # Members 0 and 1 never err together; each shares one error with member 2.
    labels_N = torch.zeros(4, dtype=torch.int64)
    predictions_MN = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]])
    rows = {tuple(row["members"]): row["ratio_error"] for row in pairwise(predictions_MN, labels_N)}
    assert rows == {(0, 1): None, (0, 2): 1.0, (1, 2): 1.0}
    assert diversity(predictions_MN, labels_N)["ratio_error"] == 1.0
