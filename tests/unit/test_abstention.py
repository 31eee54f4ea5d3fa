"""The abstention threshold keeps its promise on new inputs: simulations, plain loops, values by hand."""

import pytest
import torch
from scipy.stats import beta

from dicedist.config import compose_config
from dicedist.evaluation import calibration
from dicedist.metrics.abstention import (
    MEAN,
    NEVER,
    answers_needed,
    counts_to_test,
    coverage_threshold,
    risk_threshold,
)
from dicedist.metrics.conformal import reaches

TARGETS = compose_config([]).calibration
RISK = TARGETS.risk
DRAWS = 200


def population(hardness, N=10_000, K=5):
    """Logits of a classifier that is as sure of itself as it should be, roughly, and the labels."""
    draws = torch.Generator().manual_seed(0)
    labels_N = torch.randint(K, (N,), generator=draws)
    logits_NK = torch.randn(N, K, generator=draws, dtype=torch.float64)
    logits_NK[torch.arange(N), labels_N] += 4 * torch.rand(N, generator=draws, dtype=torch.float64) / hardness
    return logits_NK, labels_N


@pytest.mark.parametrize(("hardness", "num_inputs"), [(1, 1000), (1, 200), (0.5, 200)])
def test_the_risk_is_exceeded_in_at_most_a_tenth_of_draws(hardness, num_inputs, capsys):
    """Temperature and threshold come from the same few inputs; the risk is that of the whole population."""
    logits_NK, labels_N = population(hardness)
    exceeded, draws = 0, torch.Generator().manual_seed(1)
    for _ in range(DRAWS):
        rows = torch.randint(len(labels_N), (num_inputs,), generator=draws)
        found = calibration.fit(logits_NK[None, rows], labels_N[rows], "logits", TARGETS, {})
        confidence_N, predictions_N = (logits_NK / found.temperature).softmax(1).max(1)
        wrong_N = (predictions_N != labels_N)[reaches(confidence_N, found.threshold)]
        exceeded += len(wrong_N) > 0 and wrong_N.double().mean().item() > RISK
    assert exceeded <= 0.1 * DRAWS


def draws_of(hardness, num_inputs, count):
    """Confidence of a random part of the population, and whether its answers are right."""
    logits_NK, labels_N = population(hardness)
    confidence_N, predictions_N = logits_NK.softmax(1).max(1)
    right_N, draws = predictions_N == labels_N, torch.Generator().manual_seed(2)
    for _ in range(count):
        rows = torch.randint(len(labels_N), (num_inputs,), generator=draws)
        yield confidence_N[rows], right_N[rows]


def test_the_other_rule_keeps_the_risk_on_average():
    logits_NK, labels_N = population(0.5)
    confidence_N, predictions_N = logits_NK.softmax(1).max(1)
    risks = []
    for sample, right in draws_of(0.5, 200, DRAWS):
        wrong_N = (predictions_N != labels_N)[confidence_N >= risk_threshold(sample, right, RISK, MEAN)]
        risks.append(wrong_N.double().mean().item() if len(wrong_N) else 0.0)
    deviation = torch.tensor(risks).std().item() / DRAWS**0.5
    assert sum(risks) / DRAWS <= RISK + 2 * deviation


@pytest.mark.parametrize("guarantee", [0.5, 0.9, 0.99])
def test_equals_a_plain_loop_over_the_bounds_of_clopper_and_pearson(guarantee):
    def bound(errors, answered):
        return beta.ppf(guarantee, errors + 1, answered - errors) if errors < answered else 1

    for confidence_N, right_N in draws_of(0.6, 300, 5):
        ranked = sorted(zip(confidence_N.tolist(), right_N.tolist(), strict=True), reverse=True)
        counts, allowed = [], 0
        for count in range(1, 301):
            if bound(allowed, count) <= 0.1:
                counts, allowed = [*counts, count], allowed + 1
        while len(counts) > 1 and counts[1] <= 15:  # 5 % of the inputs
            counts = counts[1:]
        expected = NEVER
        for count in [*counts, 300]:
            if bound(sum(not right for _, right in ranked[:count]), count) > 0.1:
                break
            expected = ranked[count - 1][0]
        assert risk_threshold(confidence_N, right_N, 0.1, guarantee) == expected


def test_equals_a_plain_loop_over_the_mean():
    for confidence_N, right_N in draws_of(0.6, 300, 5):
        expected = NEVER
        for candidate in sorted(confidence_N.tolist(), reverse=True):
            answered = confidence_N >= candidate
            if (int((~right_N[answered]).sum()) + 1) / (int(answered.sum()) + 1) <= 0.1:
                expected = candidate
        assert risk_threshold(confidence_N, right_N, 0.1, MEAN) == expected


def test_so_many_right_answers_are_needed():
    """0.95^45 is the first power below 0.1, and (0 + 1)/(19 + 1) the first share of at most 0.05."""
    assert answers_needed(0.05, 0.9) == 45 and answers_needed(0.05, MEAN) == 19
    for guarantee, needed in ((0.9, 45), (MEAN, 19)):
        for count, answers in ((needed - 1, False), (needed, True)):
            sure_N = torch.linspace(0.9, 0.5, count)
            threshold = risk_threshold(sure_N, torch.ones(count, dtype=torch.bool), 0.05, guarantee)
            assert (threshold < NEVER) == answers
    assert counts_to_test(100, 0.05, 0.9) == [45, 77, 100]
    assert counts_to_test(1600, 0.05, 0.9)[:2] == [77, 105], "45 are passed over: 5 % are 80"
    assert risk_threshold(torch.rand(500), torch.ones(500, dtype=torch.bool), 0.0, 0.9) == NEVER


def test_equal_confidences_are_answered_together():
    confidence_N = torch.tensor([0.9] * 30 + [0.5] * 30)
    right_N = torch.tensor([True] * 45 + [False] * 15)
    assert risk_threshold(confidence_N, right_N, 0.1, 0.9) == pytest.approx(0.9)
    assert risk_threshold(confidence_N, right_N, 0.05, 0.9) == NEVER
    assert risk_threshold(confidence_N, right_N, 0.05, MEAN) == pytest.approx(0.9)
    assert risk_threshold(confidence_N, ~right_N, 0.1, MEAN) == NEVER


def test_a_share_is_answered():
    confidence_N = torch.rand(300, generator=torch.Generator().manual_seed(0))
    assert (confidence_N >= coverage_threshold(confidence_N, 0.7)).sum() == 210


def test_what_cannot_be_shown_is_said(capsys):
    logits_NK, labels_N = population(1)
    found = calibration.fit(logits_NK[None, :30], labels_N[:30], "logits", TARGETS, {})
    assert found.threshold == NEVER and found.answered == 0
    assert "30 images of validation cannot show that at most calibration.risk=0.05" in (line := capsys.readouterr().err)
    assert "at least 45 right answers" in line and "the ensemble always abstains" in line
