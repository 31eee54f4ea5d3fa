"""Measures of an ensemble: pure functions of logits_MNK and labels_N that give floats ready for JSON."""

from dicedist.metrics.calibration import ece, fit_temperature, reliability, split_half, tace
from dicedist.metrics.diversity import diversity, pairwise
from dicedist.metrics.ood import ood
from dicedist.metrics.scoring import (
    accuracy,
    brier,
    brier_per_class,
    confidence,
    ensemble_log_probabilities,
    ensemble_logits,
    nll,
)
from dicedist.metrics.summary import measure, validation_measures

__all__ = [
    "accuracy",
    "brier",
    "brier_per_class",
    "confidence",
    "diversity",
    "ece",
    "ensemble_log_probabilities",
    "ensemble_logits",
    "fit_temperature",
    "measure",
    "nll",
    "ood",
    "pairwise",
    "reliability",
    "split_half",
    "tace",
    "validation_measures",
]
