"""OOD scores of an input, higher for in-distribution inputs.

Evaluation measures all scores. A trained ensemble answers with one of them, also inside an exported graph.

Shapes: M members, N inputs, K classes.
"""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from dicedist.metrics.scoring import confidence, ensemble_logits, entropies

KNN, INDEPENDENCE, DICE_X_W, MAX_SOFTMAX = "knn", "w_only", "dice_x_w", "max_softmax"
SEEN = (KNN, INDEPENDENCE)  # computed from features by the caller
FROM_LOGITS: dict[str, Callable[[Tensor, str], Tensor]] = {  # functions of logits_MNK and the ensemble's average
    MAX_SOFTMAX: lambda logits_MNK, average: confidence(ensemble_logits(logits_MNK, average)),
    "entropy": lambda logits_MNK, average: -entropies(logits_MNK)["predictive_entropy"],
    "mutual_information": lambda logits_MNK, average: -entropies(logits_MNK)["mutual_information"],
    "max_logit": lambda logits_MNK, average: ensemble_logits(logits_MNK).amax(1),  # log-probabilities have no scale
    "energy": lambda logits_MNK, average: ensemble_logits(logits_MNK).logsumexp(1),
}


def needs(name: str) -> str | None:
    """Return the entry of SEEN that a score needs; None if logits suffice."""
    return {KNN: KNN, INDEPENDENCE: INDEPENDENCE, DICE_X_W: INDEPENDENCE}.get(name)


def score(name: str, logits_MNK: Tensor, average: str, seen: Mapping[str, Tensor]) -> Tensor:
    """Return the named score of each input. seen: the values of `needs(name)`, one for each input."""
    if name in SEEN:
        return seen[name]
    if name == DICE_X_W:
        return confidence(ensemble_logits(logits_MNK, average) * seen[INDEPENDENCE][:, None])
    return FROM_LOGITS[name](logits_MNK, average)


def available(wanted: str, seen: Collection[str]) -> str:
    """Return the wanted score, or max_softmax if `seen` lacks what the score needs: independent members have no w."""
    return wanted if needs(wanted) in (None, *seen) else MAX_SOFTMAX
