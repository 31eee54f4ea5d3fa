"""OOD scores of an input, higher for in-distribution inputs.

Evaluation measures all scores. A trained ensemble answers with one of them, also inside an exported graph.

Shapes: M members, N inputs, K classes.
"""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from dicedist.metrics.scoring import confidence, ensemble_logits, entropies

KNN, INDEPENDENCE, DICE_X_W, MAX_SOFTMAX = "knn", "w_only", "dice_x_w", "max_softmax"
OF_FEATURES = (KNN, INDEPENDENCE)  # scores that the caller computes from features
FROM_LOGITS: dict[str, Callable[[Tensor, str], Tensor]] = {  # functions of logits_MNK and the ensemble's average
    MAX_SOFTMAX: lambda logits_MNK, average: confidence(ensemble_logits(logits_MNK, average)),
    "entropy": lambda logits_MNK, average: -entropies(logits_MNK)["predictive_entropy"],
    "mutual_information": lambda logits_MNK, average: -entropies(logits_MNK)["mutual_information"],
    "max_logit": lambda logits_MNK, average: ensemble_logits(logits_MNK).amax(1),  # log-probabilities have no scale
    "energy": lambda logits_MNK, average: ensemble_logits(logits_MNK).logsumexp(1),
}


def needs(name: str) -> str | None:
    """Return the entry of OF_FEATURES that a score needs; None if logits suffice."""
    return {KNN: KNN, INDEPENDENCE: INDEPENDENCE, DICE_X_W: INDEPENDENCE}.get(name)


def score(name: str, logits_MNK: Tensor, average: str, feature_scores: Mapping[str, Tensor]) -> Tensor:
    """Return the named score of each input. feature_scores: the values of `needs(name)`, one for each input."""
    if name in OF_FEATURES:
        return feature_scores[name]
    if name == DICE_X_W:
        return confidence(ensemble_logits(logits_MNK, average) * feature_scores[INDEPENDENCE][:, None])
    return FROM_LOGITS[name](logits_MNK, average)


def available(wanted: str, feature_scores: Collection[str]) -> str:
    """Return the wanted score, or max_softmax if its feature score is missing: independent members have no w."""
    return wanted if needs(wanted) in (None, *feature_scores) else MAX_SOFTMAX
