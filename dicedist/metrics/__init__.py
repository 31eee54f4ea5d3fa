"""Measures of an ensemble: pure functions of logits_MNK and labels_N that return floats ready for JSON.

Examples:
    >>> log_p_NK = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
    >>> labels_N = torch.tensor([0, 1])
    >>> accuracy(log_p_NK, labels_N), round(brier(log_p_NK, labels_N), 3)
    (1.0, 0.17)
"""

from dicedist.metrics.calibration import ece, fit_temperature, reliability, split_half, tace, temperature_spread
from dicedist.metrics.diversity import diversity, pairwise
from dicedist.metrics.ood import ood
from dicedist.metrics.scoring import (
    accuracy,
    brier,
    brier_per_class,
    confidence,
    ensemble_log_probabilities,
    ensemble_logits,
    entropies,
    entropy,
    nll,
)
from dicedist.metrics.selective import risk_coverage
from dicedist.metrics.statistics import Interval, bootstrap, over_seeds, paired_over_seeds
from dicedist.metrics.summary import ALL, checked, full_measures, measure, training_measures, validation_measures

__all__ = [
    "ALL", "Interval", "accuracy", "bootstrap", "brier", "brier_per_class", "checked", "confidence", "diversity",
    "ece", "ensemble_log_probabilities", "ensemble_logits", "entropies", "entropy", "fit_temperature",
    "full_measures", "measure", "nll", "ood", "over_seeds", "paired_over_seeds", "pairwise", "reliability",
    "risk_coverage", "split_half", "tace", "temperature_spread", "training_measures", "validation_measures",
]  # fmt: skip
