"""Variational information bottleneck, equation 8 of the paper: VCEB with the same mean b for all classes."""

from torch import Tensor

from dicedist.algorithm.objectives import vceb
from dicedist.algorithm.schedules import ScheduleValues


class Term(vceb.Term):
    def prior_rows(self, num_classes: int) -> int | None:
        return 1

    def backward_mean(self, prior_KD: Tensor, labels_B: Tensor) -> Tensor:
        return prior_KD

    def weight(self, now: ScheduleValues) -> float:
        return now.compression_ib
