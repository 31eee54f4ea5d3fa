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
        """Take the features from the fields. Deterministic members send no scale: theirs is 1."""
        return cls(read["mean"], read["scale"] if "scale" in read else torch.ones_like(read["mean"]))


Read = Mapping[str, Tensor]  # the fields that a counterpart reads, by name, each [M, B, width]


@dataclass(frozen=True)
class Division:
    """The division of a counterpart's work among ranks that hold equal copies of it; by default one rank does all."""

    nth: int = 0  # this rank's place among these ranks
    ranks: int = 1
    sum_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None  # over all these ranks

    def own(self, items: int) -> slice:
        """Return this rank's slice of `items` equal pieces of work."""
        return share(items, self.ranks, self.nth)


class Counterpart(nn.Module):
    """A module that reads all members. A step calls `answers`, with the weights of the previous step, then `study`.

    A divided counterpart answers for its own share only, and members add up the answers of all its ranks. The records
    average named values over the ranks, as they do over replicas.
    """

    divisible = False
    division = Division()

    @property
    def weights(self) -> nn.Module:
        """Return the module that a moving average follows."""
        return self

    def answers(self, read: Read, targets: Targets, now: ScheduleValues, key: StepKey) -> tuple[Answers, Values]:
        """Return the answers to all members, each tensor [M, B, width], and named values for the records."""
        raise NotImplementedError

    def study(
        self, optimizer: torch.optim.Optimizer, read: Read, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> Values:
        """Train on the same fields, and return named values for the records."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError


class Adversary(Counterpart):
    """A counterpart that answers gradients of the means."""

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
        """Return d(loss)/d(means) [M, B, D] with its weight applied, and named values for the records."""
        raise NotImplementedError

    def learn(
        self, optimizer: torch.optim.Optimizer, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> Values:
        """Train on the same features, and return named values for the records."""
        raise NotImplementedError
