"""Ensemble probabilities and proper scores, by hand and against scikit-learn."""

import math

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

from dicedist.metrics import (
    accuracy,
    brier,
    brier_per_class,
    confidence,
    ensemble_log_probabilities,
    ensemble_logits,
    nll,
)

# Two members, one input, two classes: probabilities (0.9, 0.1) and (0.5, 0.5).
TWO_MEMBERS = torch.tensor([[[math.log(9), 0.0]], [[0.0, 0.0]]], dtype=torch.float64)


def random_log_p(N=500, K=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_NK = 2 * torch.randn(N, K, generator=generator, dtype=torch.float64)
    return logits_NK.log_softmax(dim=1), torch.randint(K, (N,), generator=generator)


def test_mean_of_logits():
    # The mean logit is log(9)/2 = log(3): probabilities 3/4 and 1/4.
    assert ensemble_log_probabilities(TWO_MEMBERS).exp()[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-14)


def test_mean_of_probabilities():
    p_NK = ensemble_log_probabilities(TWO_MEMBERS, average="probabilities").exp()
    assert p_NK[0].tolist() == pytest.approx([0.7, 0.3], rel=1e-14)
    assert ensemble_logits(TWO_MEMBERS, average="probabilities").exp()[0].tolist() == pytest.approx([0.7, 0.3])


def test_temperature_divides_the_averaged_logits():
    hot = ensemble_log_probabilities(TWO_MEMBERS, temperature=0.5).exp()[0, 0].item()
    assert hot == pytest.approx(9 / 10, rel=1e-14)
    hot = ensemble_log_probabilities(TWO_MEMBERS, average="probabilities", temperature=0.5).exp()[0, 0].item()
    assert hot == pytest.approx(0.49 / (0.49 + 0.09), rel=1e-14)


def test_low_precision_logits_are_averaged_in_float64():
    logits_MNK = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)[:, None, None]
    assert ensemble_logits(logits_MNK).item() == pytest.approx(7 / 3, rel=1e-15)


def test_unknown_average():
    with pytest.raises(ValueError, match="'logits' or 'probabilities', not 'votes'"):
        ensemble_logits(TWO_MEMBERS, average="votes")


def test_scores_by_hand():
    log_p_NK = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64).log()
    labels_N = torch.tensor([0, 1])
    assert accuracy(log_p_NK, labels_N) == 0.5
    assert confidence(log_p_NK).tolist() == pytest.approx([0.7, 0.6])
    assert nll(log_p_NK, labels_N) == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2)
    assert brier(log_p_NK, labels_N) == pytest.approx((0.09 + 0.04 + 0.01 + 0.01 + 0.49 + 0.36) / 2)
    assert brier_per_class(log_p_NK, labels_N) == pytest.approx(brier(log_p_NK, labels_N) / 3)


def test_scores_equal_scikit_learn():
    log_p_NK, labels_N = random_log_p()
    p, y = log_p_NK.exp().numpy(), labels_N.numpy()
    assert nll(log_p_NK, labels_N) == pytest.approx(log_loss(y, p), rel=1e-12)
    assert brier(log_p_NK, labels_N) == pytest.approx(brier_score_loss(y, p, scale_by_half=False), rel=1e-12)
    assert accuracy(log_p_NK, labels_N) == pytest.approx((p.argmax(1) == y).mean(), rel=1e-15)
