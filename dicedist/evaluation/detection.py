"""OOD scores, and how well each separates the test images from OOD sets and groups of OOD sets.

Legend: M members, B inputs of a batch, N inputs, D features, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.evaluation.readings import Collected, Scores
from dicedist.metrics import ood_scores
from dicedist.metrics.features import Reference, knn
from dicedist.metrics.measures import OOD, OOD_SCORES
from dicedist.metrics.ood import auroc_resamples, percentiles
from dicedist.metrics.ood_scores import DICE_X_W, FROM_LOGITS, INDEPENDENCE, KNN

HISTOGRAM = 20
EVERY_SET = "all"  # the only group of a run that names no groups
OwnScore = Callable[[Tensor, Tensor], Tensor]  # of logits [M, B, K] and features [M, B, D]: [B], high for known inputs


@dataclass(frozen=True)
class Scorer:
    """All OOD scores of an ensemble: `feature_scores` reads one batch at a time, a call adds the scores of logits."""

    average: str
    independence: Callable[[Tensor, Tensor], Tensor] | None = None  # of means and labels: the mean of 1 - w over pairs
    bank_RMD: Tensor | None = None  # of training features
    reference: Reference | None = None  # the classes of training features
    own: Mapping[str, OwnScore] = field(default_factory=dict)  # the user's own scores, by name
    temperature: float = 1.0
    scaled_temperature: float = 1.0  # of the logits times independence

    def feature_scores(self, logits_MBK: Tensor, means_MBD: Tensor) -> Scores:
        scores = {}
        if self.bank_RMD is not None:
            scores[KNN] = knn(self.bank_RMD, means_MBD).double()
        if self.reference is not None:
            scores["mahalanobis"] = self.reference.mahalanobis(means_MBD)
        if self.independence is not None:
            labels_B = metrics.ensemble_logits(logits_MBK, self.average).argmax(1)
            scores[INDEPENDENCE] = self.independence(means_MBD, labels_B)
        for name, own in self.own.items():
            scores[name] = checked(name, own(logits_MBK, means_MBD), means_MBD.shape[1])
        return scores

    def fitted(self, test: Collected, temperature: float) -> "Scorer":
        """Return a scorer with temperatures from the paper's protocol on the test set, as in its tables."""
        if INDEPENDENCE not in test.feature_scores:
            return replace(self, temperature=temperature)
        scaled_NK = metrics.ensemble_logits(test.logits_MNK, self.average) * test.feature_scores[INDEPENDENCE][:, None]
        own = metrics.split_half(scaled_NK, test.labels_N, {})["temperature"] or 1.0
        return replace(self, temperature=temperature, scaled_temperature=own)

    def __call__(self, collected: Collected) -> Scores:
        logits_MNK, of_features = collected.logits_MNK, collected.feature_scores
        logits_NK = metrics.ensemble_logits(logits_MNK, self.average)
        names = [*FROM_LOGITS, *([DICE_X_W] if INDEPENDENCE in of_features else [])]
        scores = {
            **of_features,
            **{name: ood_scores.score(name, logits_MNK, self.average, of_features) for name in names},
        }
        scores["max_softmax_tempered"] = metrics.confidence(logits_NK / self.temperature)
        if INDEPENDENCE in of_features:
            scaled_NK = logits_NK * of_features[INDEPENDENCE][:, None]
            scores["dice_x_w_tempered"] = metrics.confidence(scaled_NK / self.scaled_temperature)
        return {name: scores[name] for name in (*OOD_SCORES, *self.own) if name in scores}


def checked(name: str, scores_B: Tensor, count: int) -> Tensor:
    """Raise a ValueError if a user's own score is not a finite number for each input."""
    if not isinstance(scores_B, Tensor) or scores_B.shape != (count,) or not scores_B.isfinite().all():
        found = list(scores_B.shape) if isinstance(scores_B, Tensor) else type(scores_B).__name__
        raise ValueError(f"ood_scores {name!r} returned {found}: return a tensor [{count}] of finite numbers")
    return scores_B.detach().cpu().double()


def detect(inside: Scores, outside: Mapping[str, Scores], groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return `ood`: set -> score -> measures, and `ood_groups`: group -> sets found and missing, mean measures."""
    by_set: dict[str, Any] = {}
    resamples: dict[str, dict[str, Tensor]] = {}
    for name, scores in outside.items():
        resamples[name] = {score: auroc_resamples(inside[score], scores[score], name) for score in inside}
        by_set[name] = {
            score: {
                **metrics.ood(inside[score], scores[score]),
                "auroc_interval": percentiles(resamples[name][score]),
                **histograms(inside[score], scores[score]),
            }
            for score in inside
        }
    by_group = {}
    for group, set_names in groups.items():
        if found := [name for name in set_names if name in outside]:
            by_group[group] = {
                "sets": found,
                "missing": [name for name in set_names if name not in outside],
                "scores": {score: averaged(score, found, by_set, resamples) for score in inside},
            }
    return {"ood": by_set, "ood_groups": by_group}


def averaged(
    score: str, names: Sequence[str], by_set: Mapping[str, Any], resamples: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """Return means over sets, with the interval of the mean; all sets share the resampled test images."""
    means = {measure.name: fmean(by_set[name][score][measure.name] for name in names) for measure in OOD}
    together_R = torch.stack([resamples[name][score] for name in names]).mean(0)
    return {**means, "auroc_interval": percentiles(together_R)}


def histograms(inside_N: Tensor, outside_N: Tensor) -> dict[str, Any]:
    """Return the share of scores in equal bins over 0..1, or over the range of an unbounded score."""
    low, high = (min(inside_N.min(), outside_N.min()).item(), max(inside_N.max(), outside_N.max()).item())
    low, high = (0.0, 1.0) if 0 <= low and high <= 1 else (low, high)
    return {"range": [low, high], "histogram": [histogram(side_N, low, high) for side_N in (inside_N, outside_N)]}


def histogram(scores_N: Tensor, low: float = 0, high: float = 1) -> list[float]:
    return (torch.histc(scores_N.float(), HISTOGRAM, low, high) / len(scores_N)).tolist()
