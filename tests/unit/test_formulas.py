"""The formulas of docs/measures.md, run as they stand there, are what the code computes."""

import numpy as np
import pytest
import torch

from dicedist import metrics
from dicedist.evaluation.redundancy import two_terms
from dicedist.evaluation.shift import shift_measures
from dicedist.metrics.measures import (
    ALL,
    CORRUPTION_ERROR,
    DIVERSITY,
    ENSEMBLE,
    FURTHER,
    OOD,
    REDUNDANCIES,
    UNCERTAINTY,
)
from tests.support.pages import names_of

M, N, K = 4, 400, 6


@pytest.fixture(scope="module")
def page():
    return names_of("measures.md", blocks=3)


@pytest.fixture(scope="module")
def predictions():
    """Logits [M, N, K] that are right more often than not, and labels."""
    draws = np.random.default_rng(0)
    y = draws.integers(K, size=N)
    shared = draws.normal(size=(N, K)) + 2.2 * (np.arange(K) == y[:, None])
    return shared + draws.normal(size=(M, N, K)), y


def test_every_measure_has_a_formula(page):
    assert [measure.name for measure in ALL if not callable(getattr(page, measure.name, None))] == []


@pytest.mark.parametrize("measure", (*ENSEMBLE, *FURTHER), ids=lambda measure: measure.name)
def test_of_probabilities(page, predictions, measure):
    z, y = predictions
    expected = measure.function(metrics.ensemble_log_probabilities(torch.tensor(z)), torch.tensor(y))
    assert getattr(page, measure.name)(page.softmax(z.mean(0)), y) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_of_label_sets(page):
    assert page.set_size(np.array([[True, False, True], [False, True, False]])) == 1.5


@pytest.mark.parametrize("measure", DIVERSITY, ids=lambda measure: measure.name)
def test_of_pairs(page, predictions, measure):
    z, y = predictions
    expected = metrics.diversity(torch.tensor(z).argmax(2), torch.tensor(y))[measure.name]
    assert getattr(page, measure.name)(z, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("measure", UNCERTAINTY, ids=lambda measure: measure.name)
def test_of_uncertainty(page, predictions, measure):
    expected = metrics.entropies(torch.tensor(predictions[0]))[measure.name].mean().item()
    assert getattr(page, measure.name)(predictions[0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("measure", OOD, ids=lambda measure: measure.name)
def test_of_scores(page, measure):
    draws = np.random.default_rng(1)
    for a, b in (
        (draws.normal(1, 1, 130), draws.normal(0, 1, 90)),
        (draws.integers(9, size=70), draws.integers(7, size=50)),
    ):
        expected = metrics.ood(torch.tensor(a), torch.tensor(b))[measure.name]
        assert getattr(page, measure.name)(a, b) == pytest.approx(expected, rel=1e-12)


def test_of_temperature_and_shift(page, predictions):
    z, y = predictions
    logits, labels = torch.tensor(z), torch.tensor(y)
    assert page.temperature(z, y) == pytest.approx(metrics.fit_temperature(logits.mean(0), labels), rel=1e-3)
    found = shift_measures(logits, labels, "logits", 1.7)
    for name in ("nll_calibrated", "ece_calibrated"):
        assert getattr(page, name)(z, y, 1.7) == pytest.approx(found[name], rel=1e-9)
    assert getattr(page, CORRUPTION_ERROR.name)([[0.9, 0.7], [0.8, 0.4]]) == pytest.approx(0.3)


@pytest.mark.parametrize("measure", REDUNDANCIES, ids=lambda measure: measure.name)
def test_of_redundancy(page, measure):
    joint, product = np.random.default_rng(2).normal(size=(2, 50))
    expected = two_terms(torch.tensor(joint)[None], torch.tensor(product)[None])[0].item()
    assert getattr(page, measure.name)(joint, product) == pytest.approx(expected, rel=1e-12)
