"""The counterpart of all members: a part that reads their fields, answers each of them, then learns.

An adversary answers gradients with respect to features; a fusion answers its logits too.

Legend: M members, B inputs, D features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dicedist.algorithm.batch import StepKey, share
from dicedist.algorithm.messages import Answers, Values
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.targets import Targets


@dataclass(frozen=True)
class Features:
    """The members' features of one batch, detached and on the adversary's device."""

    means_MBD: Tensor
    scales_MBD: Tensor

    @classmethod
    def of(cls, read: "Read") -> Self:
        """Deterministic members send no scale: w then adds noise of variance 1, or none (redundancy.scale)."""
        return cls(read["mean"], read["scale"] if "scale" in read else torch.ones_like(read["mean"]))


Read = Mapping[str, Tensor]  # the fields that a counterpart reads, by name, each [M, B, width]


@dataclass(frozen=True)
class Division:
    """How the work of a counterpart is divided among ranks that hold equal copies of it. By default one does it all."""

    nth: int = 0  # this rank's place among them
    ranks: int = 1
    sum_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None  # over all of them

    def own(self, items: int) -> slice:
        """Which of so many equal pieces of work are this rank's."""
        return share(items, self.ranks, self.nth)


class Counterpart(nn.Module):
    """A step calls answers, then study: the answers come from the weights of the previous step.

    One that can be divided answers for its own share only, and the answers of all ranks are added. Named values are
    averaged over ranks in the records, as those of replicas are.
    """

    divisible = False
    division = Division()

    @property
    def weights(self) -> nn.Module:
        """The module that a moving average follows."""
        return self

    def answers(self, read: Read, targets: Targets, now: ScheduleValues, key: StepKey) -> tuple[Answers, Values]:
        """Return what each member is told, each tensor [M, B, width], and named values for the records."""
        raise NotImplementedError

    def study(
        self, optimizer: torch.optim.Optimizer, read: Read, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> Values:
        """Train on the same fields, and return named values for the records."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError


class Adversary(Counterpart):
    """Answers gradients of the means."""

    def answers(self, read: Read, targets: Targets, now: ScheduleValues, key: StepKey) -> tuple[Answers, Values]:
        gradients_MBD, values = self.redundancy_gradients(Features.of(read), targets.labels_B, now, key)
        return Answers({"mean": gradients_MBD}), values

    def study(
        self, optimizer: torch.optim.Optimizer, read: Read, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> Values:
        return self.learn(optimizer, Features.of(read), targets.labels_B, now, key)

    def redundancy_gradients(
        self, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> tuple[Tensor, Values]:
        """d(loss)/d(means) [M, B, D] with its weight applied, and named values for the records."""
        raise NotImplementedError

    def learn(
        self, optimizer: torch.optim.Optimizer, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> Values:
        """Train on the same features, and return named values for the records."""
        raise NotImplementedError
