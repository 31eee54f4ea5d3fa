"""All measures of an ensemble at once: `measure` for evaluation, `validation_measures` after every epoch.

Shapes: M members, N inputs (B at a time), K classes, S subsets of the members.
"""

import math
import random
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dicedist.config import names
from dicedist.metrics.calibration import reliability, split_half
from dicedist.metrics.diversity import diversity, pairwise
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, FURTHER, functions
from dicedist.metrics.scoring import accuracy, ensemble_log_probabilities, ensemble_logits, entropies, nll
from dicedist.metrics.selective import risk_coverage

ALL = functions((*ENSEMBLE, *FURTHER))
QUICK = functions(measure for measure in ENSEMBLE if measure.quick)
MAX_SUBSETS = 20


def measure(
    logits_MNK: Tensor, labels_N: Tensor, average: str = "logits", folds: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Return every measure but OOD detection. `seed` and `folds` choose the halves on which temperatures are fitted."""
    labels_N = checked(logits_MNK, labels_N)
    averaged_NK = ensemble_logits(logits_MNK, average)
    log_p_NK = averaged_NK.log_softmax(dim=1)
    members = _members(logits_MNK, labels_N)
    return {
        "ensemble": {name: fn(log_p_NK, labels_N) for name, fn in ALL.items()},
        "ensemble_tempered": split_half(averaged_NK, labels_N, ALL, seed, folds),
        "members": {"accuracy": _mean_of("accuracy", members), "per_member": members},
        "diversity": diversity(logits_MNK.argmax(dim=-1), labels_N),
        "uncertainty": {name: values_N.mean().item() for name, values_N in entropies(logits_MNK).items()},
        "accuracy_by_size": _accuracy_by_size(logits_MNK, labels_N, average),
    }


def full_measures(logits_MNK: Tensor, labels_N: Tensor, average: str, folds: int) -> dict[str, Any]:
    """Return `measure` and the values of figures: pairs of members, curves, and accuracy by class."""
    measures = measure(logits_MNK, labels_N, average, folds)
    log_p_NK = ensemble_log_probabilities(logits_MNK, average)
    temperature = measures["ensemble_tempered"]["temperature"] or 1.0
    tempered_NK = ensemble_log_probabilities(logits_MNK, average, temperature)
    right_N = log_p_NK.argmax(1) == labels_N
    member_right_MN = logits_MNK.argmax(2) == labels_N
    counts_K = labels_N.bincount(minlength=logits_MNK.shape[2]).double()
    return {
        **measures,
        "num_inputs": len(labels_N),
        "pairs": pairwise(logits_MNK.argmax(2), labels_N),
        "reliability": {"before": reliability(log_p_NK, labels_N), "after": reliability(tempered_NK, labels_N)},
        "risk_coverage": _risk_curves(logits_MNK, labels_N, log_p_NK),
        "per_class": {
            "count": counts_K.long().tolist(),
            "ensemble": _per_class(right_N.double(), labels_N, counts_K),
            "members": _per_class(member_right_MN.double().mean(0), labels_N, counts_K),
        },
    }


def validation_measures(logits_MNK: Tensor, labels_N: Tensor) -> dict[str, Any]:
    """Return the records of a validation, by name. Measures without a value are left out."""
    labels_N = checked(logits_MNK, labels_N)
    averaged_NK = ensemble_logits(logits_MNK)
    log_p_NK = averaged_NK.log_softmax(dim=1)
    members = _members(logits_MNK, labels_N)
    named = {names.record(names.ENSEMBLE, name): fn(log_p_NK, labels_N) for name, fn in QUICK.items()}
    named |= {names.record(names.MEMBERS, name): _mean_of(name, members) for name in ("accuracy", "nll")}
    named |= {names.record(names.member(i), names.ACCURACY): one["accuracy"] for i, one in enumerate(members)}
    diverse = diversity(logits_MNK.argmax(dim=-1), labels_N)
    named |= {names.record(names.DIVERSITY, name): value for name, value in diverse.items()}
    named[names.record(names.TEMPERED, "nll")] = split_half(averaged_NK, labels_N, {"nll": nll})["nll"]
    return {name: value for name, value in named.items() if value is not None}


def training_measures(logits_MNK: Tensor, labels_N: Tensor) -> dict[str, Any]:
    """Return the records of training images that are compared with validation: accuracies and diversity."""
    measures = validation_measures(logits_MNK, labels_N)
    compared = {names.record(whose, names.ACCURACY) for whose in (names.ENSEMBLE, names.MEMBERS)}
    compared |= {names.record(names.DIVERSITY, measure.name) for measure in DIVERSITY}
    return {name: value for name, value in measures.items() if name in compared}


def checked(logits_MNK: Tensor, labels_N: Tensor) -> Tensor:
    """Return the labels as int64, for indexing. Raise ValueError if logits or labels cannot be measured."""
    if logits_MNK.ndim != 3 or not logits_MNK.numel():
        raise ValueError(f"logits must be [members, inputs, classes], none empty: got shape {list(logits_MNK.shape)}")
    _, N, K = logits_MNK.shape
    if labels_N.shape != (N,):
        raise ValueError(f"logits are for {N} inputs, so labels must have shape [{N}]: got {list(labels_N.shape)}")
    lowest, highest = int(labels_N.min()), int(labels_N.max())
    if lowest < 0 or highest >= K:
        raise ValueError(f"logits have {K} classes, so labels must be 0 to {K - 1}: got {lowest} to {highest}")
    broken = [i for i, finite in enumerate(logits_MNK.isfinite().flatten(1).all(dim=1).tolist()) if not finite]
    if broken:
        raise ValueError(f"member {broken[0]} gave NaN or infinite logits: it diverged, take an earlier checkpoint")
    return labels_N.long()


def _members(logits_MNK: Tensor, labels_N: Tensor) -> list[dict[str, Any]]:
    log_p_NKs = (torch.log_softmax(logits_NK, dim=1, dtype=torch.float64) for logits_NK in logits_MNK)
    return [{name: fn(log_p_NK, labels_N) for name, fn in QUICK.items()} for log_p_NK in log_p_NKs]


def _mean_of(name: str, rows: list[dict[str, Any]]) -> float:
    return math.fsum(row[name] for row in rows) / len(rows)


def _risk_curves(logits_MNK: Tensor, labels_N: Tensor, log_p_NK: Tensor) -> dict[str, Any]:
    """Return the curves of the ensemble, of the mean member, and of the member most accurate on these inputs."""
    log_p_MNK = logits_MNK.double().log_softmax(2)
    members = [risk_coverage(of_member_NK, labels_N) for of_member_NK in log_p_MNK]
    best = max(range(len(members)), key=lambda member: accuracy(log_p_MNK[member], labels_N))
    ensemble = risk_coverage(log_p_NK, labels_N)
    return {
        "coverage": ensemble["coverage"],
        "ensemble": ensemble["risk"],
        "mean member": [fmean(risks) for risks in zip(*(curve["risk"] for curve in members), strict=True)],
        "best member": members[best]["risk"],
    }


def _per_class(values_N: Tensor, labels_N: Tensor, counts_K: Tensor) -> list[float | None]:
    sums_K = torch.bincount(labels_N, values_N, len(counts_K))
    return [float(total / count) if count else None for total, count in zip(sums_K, counts_K, strict=True)]


def _accuracy_by_size(logits_MNK: Tensor, labels_N: Tensor, average: str) -> dict[str, float]:
    """Return the mean accuracy of ensembles of m members, for each m from 1 to M (keys are strings, as in JSON)."""
    M, N, _ = logits_MNK.shape
    subsets = [subset for size in range(1, M + 1) for subset in _subsets(M, size)]
    masks_SM = torch.tensor([[i in subset for i in range(M)] for subset in subsets]).to(logits_MNK.device).double()
    num_right_S = torch.zeros(len(subsets), dtype=torch.int64, device=logits_MNK.device)
    # A few inputs at a time, so that the S sums of logits fit in the cache.
    for logits_MBK, labels_B in zip(logits_MNK.split(128, dim=1), labels_N.split(128), strict=True):
        votes_MBK = logits_MBK.double() if average == "logits" else logits_MBK.double().softmax(dim=-1)
        votes_SBK = torch.tensordot(masks_SM, votes_MBK, dims=1)
        num_right_S += (votes_SBK.argmax(dim=-1) == labels_B).sum(dim=1)
    sizes_S = masks_SM.sum(dim=1)
    return {str(size): num_right_S[sizes_S == size].double().mean().item() / N for size in range(1, M + 1)}


def _subsets(M: int, size: int) -> list[tuple[int, ...]]:
    """Return all subsets of `size` members, or MAX_SUBSETS of them, the same in every call, if there are more."""
    if math.comb(M, size) <= MAX_SUBSETS:
        return list(combinations(range(M), size))
    draw = random.Random(size)
    subsets: set[tuple[int, ...]] = set()
    while len(subsets) < MAX_SUBSETS:
        subsets.add(tuple(sorted(draw.sample(range(M), size))))
    return sorted(subsets)
