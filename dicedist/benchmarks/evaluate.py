"""The time of every measure for 10 members x 10,000 inputs x 100 classes x 64 features."""

import time
from typing import Any

import torch

from dicedist.config import Config
from dicedist.evaluation.calibration import fit
from dicedist.metrics import full_measures, ood, validation_measures
from dicedist.metrics.features import Reference, bank_of, bank_size, knn
from dicedist.metrics.ood import auroc_resamples

MEMBERS, INPUTS, CLASSES, FEATURES = 10, 10_000, 100, 64


def evaluate(config: Config) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    labels_N = torch.randint(CLASSES, (INPUTS,))
    logits_MNK = 2 * torch.randn(MEMBERS, INPUTS, CLASSES)
    logits_MNK[:, torch.arange(INPUTS), labels_N] += 5
    scores = torch.rand(INPUTS)
    features_MND = torch.randn(MEMBERS, INPUTS, FEATURES)
    targets, training = config.calibration, Reference.of(features_MND, labels_N, CLASSES)
    bank_RMD = bank_of(features_MND[:, : bank_size(MEMBERS, FEATURES)])
    work = {
        "all measures, reliability, per class": lambda: full_measures(logits_MNK, labels_N, config.evaluate.average, 1),
        "after an epoch": lambda: validation_measures(logits_MNK, labels_N),
        "calibration": lambda: fit(logits_MNK, labels_N, config.evaluate.average, targets, {"knn": scores}),
        "an OOD set, one score": lambda: ood(scores + 0.1, scores),
        "bootstrap interval of its AUROC": lambda: auroc_resamples(scores + 0.1, scores),
        "KNN score of an OOD set": lambda: knn(bank_RMD, features_MND),
        "Mahalanobis score of an OOD set": lambda: training.mahalanobis(features_MND),
    }
    rows = []
    for name, run in work.items():
        started = time.perf_counter()
        run()
        rows.append({"": name, "seconds": time.perf_counter() - started})
    return rows
