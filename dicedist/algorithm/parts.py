"""The parts of an ensemble that a rank hosts: members, the modules that they share, the discriminator."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dicedist.algorithm.adversary import Adversary
from dicedist.algorithm.member import Member


@dataclass
class Part:
    """A module and its optimiser, saved under its own name whichever rank hosts it."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class Hosted:
    """The parts on this rank. Any of them may be absent."""

    members: Mapping[int, Part]
    trunk: Part | None  # shared by branches
    shared: Part | None  # the method's shared modules: a gate, an attention
    discriminator: Part | None

    @property
    def parts(self) -> list[Part]:
        return [*self.learners, *([self.discriminator] if self.discriminator else [])]

    @property
    def learners(self) -> list[Part]:
        """The parts that the members' losses train."""
        return [*self.members.values(), *self.common]

    @property
    def common(self) -> list[Part]:
        """The parts that all members train together, replicated on every rank that hosts members."""
        return [part for part in (self.trunk, self.shared) if part is not None]

    @property
    def common_parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.common for parameter in part.module.parameters()]

    @property
    def shared_modules(self) -> nn.ModuleDict | None:
        module = self.shared.module if self.shared else None
        assert module is None or isinstance(module, nn.ModuleDict)
        return module

    @property
    def w(self) -> Adversary | None:
        module = self.discriminator.module if self.discriminator else None
        assert module is None or isinstance(module, Adversary)
        return module

    def member(self, index: int) -> Member:
        module = self.members[index].module
        assert isinstance(module, Member)
        return module
