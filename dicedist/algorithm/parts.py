"""The parts of an ensemble that a rank hosts: members, companions, what members share, their counterpart."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.companion import Companion
from dicedist.algorithm.counterpart import Counterpart
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.member import Member
from dicedist.algorithm.networks.freezing import frozen_norms


@dataclass
class Part:
    """A module, its optimiser and perhaps its moving average, saved under its own name whichever rank hosts it.

    second: another optimiser of some of its parameters, for a loss of its own.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None = None
    second: torch.optim.Optimizer | None = None

    def __post_init__(self) -> None:
        self.train()

    @property
    def learns(self) -> bool:
        """Whether anything in it is not frozen."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def train(self) -> None:
        """Training mode, but for what is frozen."""
        self.module.train()
        for norm in frozen_norms(self.module):
            norm.eval()

    def follow(self) -> None:
        """The moving average, if there is one, takes a step towards the weights."""
        if self.average is not None:
            self.average.follow(followed(self.module))


def followed(module: nn.Module) -> nn.Module:
    """What a moving average follows: the weights, and of w not its class memory."""
    return module.network if isinstance(module, Discriminator) else module


@dataclass
class Hosted:
    """The parts on this rank. Any of them may be absent."""

    members: Mapping[int, Part]
    trunk: Part | None  # shared by branches
    shared: Part | None  # the method's shared modules: a gate, an attention
    discriminator: Part | None  # the counterpart of all members: w, or what a method has in its place
    companions: Mapping[int, Part] = field(default_factory=dict)  # by member

    @property
    def parts(self) -> list[Part]:
        others = [*self.companions.values(), *([self.discriminator] if self.discriminator else [])]
        return [*self.members.values(), *self.common, *others]

    @property
    def learners(self) -> list[Part]:
        """The parts that the members' losses train."""
        return [part for part in (*self.members.values(), *self.common) if part.learns]

    @property
    def common(self) -> list[Part]:
        """The parts that all members train together, replicated on every rank that hosts members."""
        return [part for part in (self.trunk, self.shared) if part is not None]

    @property
    def common_parameters(self) -> list[nn.Parameter]:
        return [p for part in self.common for p in part.module.parameters() if p.requires_grad]

    @property
    def averaged(self) -> "Hosted":
        """The same parts with the moving averages of their weights."""

        def average_of(part: Part) -> Part:
            assert part.average is not None
            return replace(part, module=part.average.module)

        members = {index: average_of(part) for index, part in self.members.items()}
        trunk, shared = (part and average_of(part) for part in (self.trunk, self.shared))
        return replace(self, members=members, trunk=trunk, shared=shared)

    @property
    def shared_modules(self) -> nn.ModuleDict | None:
        module = self.shared.module if self.shared else None
        assert module is None or isinstance(module, nn.ModuleDict)
        return module

    @property
    def w(self) -> Counterpart | None:
        module = self.discriminator.module if self.discriminator else None
        assert module is None or isinstance(module, Counterpart)
        return module

    def companion(self, index: int) -> Companion:
        module = self.companions[index].module
        assert isinstance(module, Companion)
        return module

    def member(self, index: int) -> Member:
        module = self.members[index].module
        assert isinstance(module, Member)
        return module
