"""Calibration on validation images after training: temperature, label sets, abstention, OOD threshold.

The test set is not used unless calibration.source=test. The paper's tables have another protocol, which fits the
temperature on halves of the test set: `metrics.split_half`.

Legend: M members, N inputs, K classes.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.config.checks import check_rules
from dicedist.config.schema import OOD_SCORES, CalibrationConfig
from dicedist.console.lines import plural, warn
from dicedist.evaluation.about import About, misfits
from dicedist.metrics import abstention, conformal, ood_scores
from dicedist.runs.results import Results

# Names of tensors in logits_file:
LOGITS, LABELS, FEATURE_SCORES, BANK = "calibration.logits", "calibration.labels", "calibration.seen.", "bank"


@dataclass(frozen=True)
class Calibration:
    """The choices of a calibration, in types that JSON can hold: for evaluation.json, exports and MLflow's model."""

    source: str  # validation | test: the inputs that the choices are based on
    num_inputs: int
    temperature: float
    alpha: float  # label sets miss the true label for at most this share of inputs
    conformal: str  # lac | aps
    per_class: bool
    quantiles: list[float] | None  # of the nonconformity: one, or one per class; None: too few inputs for this alpha
    risk: float | None  # the target of the threshold, or
    coverage: float | None
    threshold: float  # the lowest confidence that is answered
    ood_threshold: float | None  # lower scores are unlike the training images; None: not known for these members
    # Not in results and exports of earlier versions:
    ood_score: str | None = None  # the score of ood_threshold; None: DICE x w, without w the largest probability
    guarantee: float | str | None = None  # of the risk; None: the risk on the calibration inputs, without a guarantee
    temperature_spread: float | None = None  # half the width of its 95 % interval
    answered: int | None = None  # inputs that reach the threshold, and how many of them are answered wrongly
    wrong: int | None = None
    fewest: int | None = None  # inputs behind a quantile; with per_class, of the smallest class


def parsed(values: Any, num_classes: int | None = None) -> Calibration:
    """Parse an untrusted description of a calibration; raise a ValueError if it is damaged.

    num_classes: if known, there must be one quantile, or one per class.
    """
    try:
        found = Calibration(**values)
    except TypeError as error:
        raise ValueError("it holds no calibration of this version") from error
    if wrong := misfits(found):
        raise ValueError(f"its calibration is damaged ({wrong[0]})")
    known = found.conformal in ("lac", "aps") and found.ood_score in (None, *OOD_SCORES)
    if not found.temperature > 0 or not known:
        raise ValueError("its calibration is damaged")
    if num_classes and found.quantiles is not None and len(found.quantiles) not in (1, num_classes):
        raise ValueError(f"its calibration has {len(found.quantiles)} quantiles for {num_classes} classes")
    return found


def fit(
    logits_MNK: Tensor,
    labels_N: Tensor,
    average: str,
    config: CalibrationConfig,
    feature_scores: Mapping[str, Tensor],
    strict: bool = False,
) -> Calibration:
    """Choose temperature, label sets and thresholds.

    feature_scores: for the OOD score, which has no threshold if its feature score is missing. strict: raise a
    ValueError if there are too few inputs for alpha; otherwise (after a training) warn and make no label sets.
    """
    averaged_NK = metrics.ensemble_logits(logits_MNK, average)
    temperature = metrics.fit_temperature(averaged_NK, labels_N)
    p_NK = (averaged_NK / temperature).softmax(1)
    confidence_N, predictions_N = p_NK.max(1)
    try:
        quantiles = conformal.quantiles(p_NK, labels_N, config.alpha, config.conformal, config.per_class)
    except ValueError as error:
        if strict:
            raise
        warn(f"no sets of labels: {error}")
        quantiles = None
    right_N = predictions_N == labels_N
    threshold = lowest_answered(confidence_N, right_N, config)
    answered_N = conformal.reaches(confidence_N, threshold)
    counts_K = labels_N.bincount(minlength=p_NK.shape[1])
    scores_N = ood_scores_of(config.ood_score, logits_MNK, average, feature_scores)
    return Calibration(
        **{**asdict(config), "risk": config.risk if config.coverage is None else None},
        num_inputs=len(labels_N),
        temperature=temperature,
        quantiles=quantiles,
        threshold=threshold,
        ood_threshold=None if scores_N is None else conformal.acceptance_threshold(scores_N),
        temperature_spread=metrics.temperature_spread(averaged_NK, labels_N, temperature),
        answered=int(answered_N.sum()),
        wrong=int((answered_N & ~right_N).sum()),
        fewest=int(counts_K.min()) if config.per_class else len(labels_N),
    )


def lowest_answered(confidence_N: Tensor, right_N: Tensor, config: CalibrationConfig) -> float:
    """Return the abstention threshold, and warn if the risk cannot be kept."""
    if config.coverage is not None:
        return abstention.coverage_threshold(confidence_N, config.coverage)
    assert config.risk is not None, "a training has a risk or a coverage"
    threshold = abstention.risk_threshold(confidence_N, right_N, config.risk, config.guarantee)
    if threshold == abstention.NEVER:
        needed, number = abstention.answers_needed(config.risk, config.guarantee), plural(len(right_N), "image")
        few = f", which takes at least {needed} right answers" if len(right_N) < needed else ""
        warn(
            f"{number} of {config.source} cannot show that at most calibration.risk={config.risk:g} of the answers are "
            f"wrong (calibration.guarantee={config.guarantee}){few}: the ensemble always abstains; hold out more, "
            "allow a higher risk, or write calibration.coverage=0.8"
        )
    return threshold


def ood_scores_of(
    name: str | None, logits_MNK: Tensor, average: str, feature_scores: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the OOD scores [N]; None if they need a feature score that is missing."""
    if name is None or ood_scores.available(name, feature_scores) != name:
        return None
    return ood_scores.score(name, logits_MNK, average, feature_scores)


def kept(logits_MNK: Tensor, labels_N: Tensor, feature_scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of a calibration, to save, so that other members or targets can be calibrated later."""
    of_features = {
        f"{FEATURE_SCORES}{name}": feature_scores[name].clone()
        for name in ood_scores.OF_FEATURES
        if name in feature_scores
    }
    return {LOGITS: logits_MNK.clone(), LABELS: labels_N.clone(), **of_features}  # perhaps the tensors of the test set


def tested(
    calibration: Calibration, logits_MNK: Tensor, labels_N: Tensor, average: str, feature_scores: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Measure the choices on the test set, at the calibrated temperature."""
    scores_N = ood_scores_of(calibration.ood_score, logits_MNK, average, feature_scores)
    averaged_NK = metrics.ensemble_logits(logits_MNK, average) / calibration.temperature
    p_NK = averaged_NK.softmax(1)
    confidence_N, predictions_N = p_NK.max(1)
    answered_N = conformal.reaches(confidence_N, calibration.threshold)
    wrong = (predictions_N != labels_N)[answered_N].double()
    found: dict[str, Any] = {
        "measures": {name: fn(averaged_NK.log_softmax(1), labels_N) for name, fn in metrics.ALL.items()},
        "answered": answered_N.double().mean().item(),
        "risk": wrong.mean().item() if len(wrong) else None,
    }
    if calibration.quantiles is not None:
        sets_NK = conformal.label_sets(p_NK, calibration.quantiles, calibration.conformal)
        hit_N = sets_NK.gather(1, labels_N[:, None])[:, 0].double()
        counts_K = labels_N.bincount(minlength=p_NK.shape[1])
        per_class_K = torch.bincount(labels_N, hit_N, len(counts_K))[counts_K > 0] / counts_K[counts_K > 0]
        found["set_coverage"] = hit_N.mean().item()
        found["set_coverage_worst_class"] = per_class_K.min().item()
        found["set_size"] = sets_NK.sum(1).double().mean().item()
    if calibration.ood_threshold is not None and scores_N is not None:
        found["ood_accepted"] = conformal.reaches(scores_N, calibration.ood_threshold).double().mean().item()
    return found


def decisions(about: About, logits_NK: Tensor, confidence_N: Tensor, ood_score_N: Tensor) -> dict[str, Tensor]:
    """Return the fields of `Prediction` that a calibrated ensemble adds, also inside an exported graph."""
    if about.calibration is None:
        return {}
    found = Calibration(**about.calibration)
    sets = {}
    if found.quantiles is not None:
        p_NK = (logits_NK / found.temperature).softmax(1)
        sets["label_set"] = conformal.label_sets(p_NK, found.quantiles, found.conformal)
    reason_N = (~conformal.reaches(confidence_N, found.threshold)).long()
    if found.ood_threshold is not None:
        sets["ood_threshold"] = torch.full_like(ood_score_N, found.ood_threshold)
        reason_N = torch.where(conformal.reaches(ood_score_N, found.ood_threshold), reason_N, 2)
    return {**sets, "abstain": reason_N > 0, "reason": reason_N}


def aimed(own: CalibrationConfig, asked: Mapping[str, Any]) -> CalibrationConfig:
    """Return a run's targets, overridden by those of a command; a risk replaces a coverage."""
    named = {key: value for key, value in asked.items() if value is not None}
    aims = CalibrationConfig(**{**asdict(own), **({"coverage": None} if "risk" in named else {}), **named})
    check_rules(aims, "calibration.")
    return aims


def targets_of(saved: Mapping[str, Any]) -> CalibrationConfig:
    """Return the targets of a calibration in evaluation.json, which may lack keys of later versions."""
    return CalibrationConfig(
        **{entry.name: saved.get(entry.name, entry.default) for entry in fields(CalibrationConfig)}
    )


def of_results(
    results: Results, result: Mapping[str, Any], members: list[int], average: str, asked: Mapping[str, Any]
) -> Calibration | None:
    """Return the calibration of an evaluation; for other members, averages or targets, fit one to the saved logits.

    result: evaluation.json. asked: keys of `calibration`; None stands for the run's value. Return None if the results
    hold no calibration.
    """
    try:
        whole = parsed({name: result["calibration"][name] for name in known_in(result["calibration"])})
        evaluated = result["member_ids"]
        if (evaluated, result["average"]) == (members, average) and set(asked.values()) <= {None}:
            return whole
        rows = [evaluated.index(number) for number in members]
        saved = results.tensors(results.logits_file, result)
        logits_MNK, labels_N = saved[LOGITS][rows], saved[LABELS]
        if labels_N.shape != logits_MNK.shape[1:2] or not 0 <= labels_N.min() <= labels_N.max() < logits_MNK.shape[2]:
            return None  # damaged
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    aims, is_whole = aimed(targets_of(result["calibration"]), asked), members == evaluated
    known = [name for name in ood_scores.OF_FEATURES if FEATURE_SCORES + name in saved and is_whole]
    feature_scores = {name: saved[FEATURE_SCORES + name] for name in known}
    if asked.get("ood_score") and ood_scores.available(aims.ood_score, feature_scores) != aims.ood_score:
        raise ValueError(
            f"calibration.ood_score={aims.ood_score}: {results} does not hold this score for members {members}; "
            f"`dicedist evaluate` with calibration.ood_score={aims.ood_score} measures it, if members have it"
        )
    found = fit(logits_MNK, labels_N, average, aims, feature_scores, strict=asked.get("alpha") is not None)
    if whole.ood_score is None and not asked.get("ood_score"):  # an earlier version: its threshold has no target
        return replace(found, ood_score=None, ood_threshold=whole.ood_threshold if is_whole else None)
    return found


def known_in(saved: Mapping[str, Any]) -> list[str]:
    """Return the fields to read from results, perhaps of an earlier version; raise a KeyError if one is missing."""
    return [entry.name for entry in fields(Calibration) if entry.name in saved or entry.default is MISSING]
