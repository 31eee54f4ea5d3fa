"""Measures of an ensemble on shifted images, for each kind and severity, and their means over kinds.

Legend: M members, N inputs, K classes.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from dicedist import metrics
from dicedist.data.shift import Shift
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.readings import LOGITS, Reader
from dicedist.metrics.calibration import mean_of_known
from dicedist.metrics.measures import CORRUPTION_ERROR, SHIFT, functions

PLAIN = functions(SHIFT)
CLEAN = 0  # the severity of the unchanged test images


def add_shift(findings: Findings | None, name: str, reader: Reader, shift: Shift) -> None:
    """Measure shifted images, and add the measures to the findings, which rank 0 has. All ranks call this."""
    calibrated = findings.result.get("calibration") if findings else None
    temperature = calibrated["temperature"] if calibrated else None
    by_severity: dict[str, list[dict[str, Any]]] = {}
    sets: dict[str, dict[str, Any]] = {}
    clean = [("", CLEAN, shift.clean)] if shift.clean else []
    for kind, severity, split in chain(clean, shift.sets):
        read = reader.collect(split, f"images of {kind} {severity}" if kind else "test images", (LOGITS,))
        if read is not None:
            found = shift_measures(read.logits_MNK, read.labels_N, reader.about.average, temperature)
            by_severity.setdefault(str(severity), []).append(found)
            if kind:
                sets.setdefault(kind, {})[str(severity)] = found
    if findings is None:
        return
    errors = [1 - found["accuracy"] for levels in sets.values() for found in levels.values()]
    result = {
        "num_inputs": len(split),
        "sets": sets,
        "mean": {severity: averaged(rows) for severity, rows in by_severity.items()},
        CORRUPTION_ERROR.name: sum(errors) / len(errors),
    }
    findings.result["shift"] = {name: result}


def shift_measures(logits_MNK: Tensor, labels_N: Tensor, average: str, temperature: float | None) -> dict[str, Any]:
    log_p_NK = metrics.ensemble_log_probabilities(logits_MNK, average)
    found: dict[str, Any] = {name: fn(log_p_NK, labels_N) for name, fn in PLAIN.items()}
    if temperature is not None:
        tempered_NK = metrics.ensemble_log_probabilities(logits_MNK, average, temperature)
        found["nll_calibrated"] = metrics.nll(tempered_NK, labels_N)
        found["ece_calibrated"] = metrics.ece(tempered_NK, labels_N)
    found["ratio_error"] = metrics.diversity(logits_MNK.argmax(2), labels_N)["ratio_error"]
    found["mutual_information"] = metrics.entropies(logits_MNK)["mutual_information"].mean().item()
    return found


def averaged(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    return {name: mean_of_known(row[name] for row in rows) for name in rows[0]}
