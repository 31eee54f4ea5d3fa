"""How an ensemble fares on shifted images: measures at each severity of each kind, and their means over kinds.

Legend: M members, N inputs, K classes.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dicedist import metrics
from dicedist.data.shift import Shift
from dicedist.evaluation.readings import LOGITS, Reader
from dicedist.metrics.calibration import mean_of_known
from dicedist.metrics.measures import CORRUPTION_ERROR, SHIFT, functions

PLAIN = functions(SHIFT)
CLEAN = "0"  # the severity of the test images as they are


def measure_shift(reader: Reader, shift: Shift, temperature: float | None) -> dict[str, Any] | None:
    """All ranks call; the reporter gets the results. temperature: of validation, known to the reporter."""
    average = reader.about.average
    readings = reader.collect(shift.clean, "test images", (LOGITS,)) if shift.clean else None
    by_severity: dict[str, list[dict[str, Any]]] = {}
    if readings is not None and shift.clean is not None:
        by_severity[CLEAN] = [shift_measures(readings.logits_MNK, shift.clean.labels_N, average, temperature)]
    sets: dict[str, dict[str, Any]] = {}
    num_inputs = 0
    for name, severity, split in shift.sets:
        readings = reader.collect(split, f"images of {name} {severity}", (LOGITS,))
        if readings is None:
            continue
        num_inputs = len(split)
        found = shift_measures(readings.logits_MNK, split.labels_N, average, temperature)
        sets.setdefault(name, {})[str(severity)] = found
        by_severity.setdefault(str(severity), []).append(found)
    if not sets:
        return None
    errors = [1 - found["accuracy"] for levels in sets.values() for found in levels.values()]
    return {
        "num_inputs": num_inputs,
        "sets": sets,
        "mean": {severity: averaged(rows) for severity, rows in by_severity.items()},
        CORRUPTION_ERROR.name: sum(errors) / len(errors),
    }


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
