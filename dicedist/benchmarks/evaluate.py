"""The time of every measure for 10 members x 10,000 inputs x 100 classes."""

import time
from typing import Any

import torch

from dicedist.config import Config
from dicedist.evaluation.evaluator import measured
from dicedist.metrics import ood, validation_measures

MEMBERS, INPUTS, CLASSES = 10, 10_000, 100


def evaluate(config: Config) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    labels_N = torch.randint(CLASSES, (INPUTS,))
    logits_MNK = 2 * torch.randn(MEMBERS, INPUTS, CLASSES)
    logits_MNK[:, torch.arange(INPUTS), labels_N] += 5
    scores = torch.rand(INPUTS)
    work = {
        "all measures, reliability, per class": lambda: measured(logits_MNK, labels_N, config.evaluate.average, 1),
        "after an epoch": lambda: validation_measures(logits_MNK, labels_N),
        "an OOD set": lambda: ood(scores + 0.1, scores),
    }
    rows = []
    for name, run in work.items():
        started = time.perf_counter()
        run()
        rows.append({"": name, "seconds": time.perf_counter() - started})
    return rows
