"""Evaluate the logits of any ensemble, from a file.

Legend: M members, N inputs, V validation inputs, K classes.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dicedist import metrics
from dicedist.config import compose_config
from dicedist.config.requests import EvaluateRequest
from dicedist.config.schema import AVERAGES
from dicedist.console.lines import warn
from dicedist.data.prepared import refuse_unwritable
from dicedist.evaluation import calibration
from dicedist.evaluation.loading import chosen_members
from dicedist.runs.results import Results

TEST = ("logits", "labels")
VALIDATION = ("val_logits", "val_labels")
OUR_VALIDATION = (calibration.LOGITS, calibration.LABELS)  # in the logits.safetensors of a run
Given = dict[tuple[str, str], tuple[Tensor, Tensor]]  # TEST, and perhaps VALIDATION


def evaluate_logits(path: Path, request: EvaluateRequest) -> tuple[Results, dict[str, Any]]:
    results = Results(request.output or path.with_name(f"{path.stem}-evaluation"))
    refuse_unwritable(results.directory, "write output=FOLDER")
    given = read_logits(path)
    logits_MNK, labels_N = given[TEST]
    warn_of_probabilities(logits_MNK)
    if request.members is not None and not isinstance(request.members, list):
        raise ValueError(f"members={request.members}: write numbers like [0,2]")
    members = chosen_members(request.members, len(logits_MNK))
    average = request.average or AVERAGES[0]
    result = {
        "member_ids": members,
        "average": average,
        **metrics.full_measures(logits_MNK[members], labels_N, average, request.folds or 1),
        "redundancy": None,
        "ood": {},
        "ood_groups": {},
        "ood_missing": [],
        **calibrated(path, given, members, average, request),
    }
    results.write_result(result)
    return results, result


def calibrated(path: Path, given: Given, members: list[int], average: str, request: EvaluateRequest) -> dict[str, Any]:
    """Calibrate on validation logits, if the file holds any, or on the test set if the user asks for it."""
    asked = {key: value for key, value in asdict(request.calibration).items() if value is not None}
    targets = calibration.aimed(compose_config([]).calibration, asked)
    names = TEST if targets.source == "test" else VALIDATION
    if names not in given and asked:
        raise ValueError(
            f"{path} holds no validation logits, which calibration.{[*asked][0]} needs: add val_logits [M, V, K] and "
            "val_labels [V] to the file, or write calibration.source=test"
        )
    if names not in given:
        return {}
    (logits_MNK, labels_N), (chosen_on_MVK, labels_V) = given[TEST], given[names]
    metrics.checked(chosen_on_MVK, labels_V)
    if [logits_MNK.shape[dim] for dim in (0, 2)] != [chosen_on_MVK.shape[dim] for dim in (0, 2)]:
        shapes = f"{list(logits_MNK.shape)} and {list(chosen_on_MVK.shape)}"
        raise ValueError(f"{path}: logits are {shapes}: give the same members and classes for test and validation")
    fitted = calibration.fit(chosen_on_MVK[members], labels_V, average, targets, {}, "alpha" in asked)
    found = calibration.tested(fitted, logits_MNK[members], labels_N, average, {})
    return {"calibration": {**asdict(fitted), "test": found}}


def warn_of_probabilities(logits_MNK: Tensor) -> None:
    sums = logits_MNK.float().sum(-1)
    if logits_MNK.numel() and logits_MNK.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        warn("the logits look like probabilities: every row is in 0..1 and adds up to 1; give their logarithms")


def read_logits(path: Path) -> Given:
    try:
        if not path.is_file():
            raise ValueError("not a plain file")  # a pipe would never end
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            with np.load(path, allow_pickle=False) as file:
                tensors = {name: torch.from_numpy(file[name]) for name in file.files}
        given = {TEST: (tensors[TEST[0]], tensors[TEST[1]])}
        for logits, labels in (OUR_VALIDATION, VALIDATION):
            if logits in tensors:
                given[VALIDATION] = tensors[logits], tensors[labels]
        return given
    except Exception as error:  # numpy may raise anything for a damaged head, from SyntaxError to MemoryError
        raise ValueError(f"{path}: not an .npz or .safetensors with logits [M, N, K] and labels [N]") from error
