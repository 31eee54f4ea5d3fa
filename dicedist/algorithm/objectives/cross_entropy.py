"""Cross-entropy of each member by itself: independent training."""

from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.schedules import Moment


class Term(Objective):
    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(view.own.logits_BK, view.labels_B)}
