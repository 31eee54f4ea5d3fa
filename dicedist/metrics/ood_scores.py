"""Scores that tell inputs of the training's kind from others, higher for inputs of its kind.

Evaluation measures all of them. A trained ensemble answers with one: `score` computes it inside an exported graph too.

Shapes: M members, N inputs, K classes.
"""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from dicedist.metrics.scoring import confidence, ensemble_logits, entropies

KNN, INDEPENDENCE, DICE_X_W, MAX_SOFTMAX = "knn", "w_only", "dice_x_w", "max_softmax"
OF_FEATURES = (KNN, INDEPENDENCE)  # scores that the caller computes from features
FROM_LOGITS: dict[str, Callable[[Tensor, str], Tensor]] = {  # of logits_MNK and the ensemble's average
    MAX_SOFTMAX: lambda logits_MNK, average: confidence(ensemble_logits(logits_MNK, average)),
    "entropy": lambda logits_MNK, average: -entropies(logits_MNK)["predictive_entropy"],
    "mutual_information": lambda logits_MNK, average: -entropies(logits_MNK)["mutual_information"],
    "max_logit": lambda logits_MNK, average: ensemble_logits(logits_MNK).amax(1),  # log-probabilities have no scale
    "energy": lambda logits_MNK, average: ensemble_logits(logits_MNK).logsumexp(1),
}


def needs(name: str) -> str | None:
    """Return the feature score that a score is made of; None: logits alone."""
    return {KNN: KNN, INDEPENDENCE: INDEPENDENCE, DICE_X_W: INDEPENDENCE}.get(name)


def score(name: str, logits_MNK: Tensor, average: str, feature_scores: Mapping[str, Tensor]) -> Tensor:
    """feature_scores: the scores of features that this score needs, one value for each input."""
    if name in OF_FEATURES:
        return feature_scores[name]
    if name == DICE_X_W:
        return confidence(ensemble_logits(logits_MNK, average) * feature_scores[INDEPENDENCE][:, None])
    return FROM_LOGITS[name](logits_MNK, average)


def available(wanted: str, feature_scores: Collection[str]) -> str:
    """Return the score, or the largest probability where its feature score is missing, as w of independent members."""
    return wanted if needs(wanted) in (None, *feature_scores) else MAX_SOFTMAX
