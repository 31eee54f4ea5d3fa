"""The parts of an ensemble that this rank hosts, built from the config: members, what they share, the discriminator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dicedist import networks
from dicedist.config import Config
from dicedist.discriminator import Discriminator
from dicedist.member import Member
from dicedist.objectives import Method
from dicedist.randomness import initialising


@dataclass
class Part:
    """Something with weights and an optimiser, saved under its own name wherever it lives."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class Hosted:
    """What lives on this rank. Any of it may be absent."""

    members: Mapping[int, Part]
    trunk: Part | None
    discriminator: Part | None

    @property
    def parts(self) -> list[Part]:
        shared = [part for part in (self.trunk, self.discriminator) if part is not None]
        return [*self.members.values(), *shared]

    @property
    def learners(self) -> list[Part]:
        """What the members' losses train."""
        return [*self.members.values(), *([self.trunk] if self.trunk else [])]

    @property
    def w(self) -> Discriminator | None:
        module = self.discriminator.module if self.discriminator else None
        assert module is None or isinstance(module, Discriminator)
        return module

    def member(self, index: int) -> Member:
        module = self.members[index].module
        assert isinstance(module, Member)
        return module


def build_hosted(
    config: Config,
    method: Method,
    members: Sequence[int],
    hosts_discriminator: bool,
    num_members: int,
    num_classes: int,
    device: torch.device,
) -> Hosted:
    branch = config.structure == "branch"
    hosted_members = {
        member: learner(f"member-{member}", build_member(config, method, member, num_classes), config, device)
        for member in members
    }
    trunk = learner("trunk", build_trunk(config), config, device) if branch and members else None
    discriminator = None
    if hosts_discriminator:
        module = build_discriminator(config, method, num_members, num_classes).to(device)
        optimizer = torch.optim.RMSprop(module.network.parameters(), lr=config.redundancy.lr)
        discriminator = Part("discriminator", module, optimizer)
    return Hosted(hosted_members, trunk, discriminator)


def learner(name: str, module: nn.Module, config: Config, device: torch.device) -> Part:
    module = module.to(device).to(memory_format=torch.channels_last)
    if config.compile:
        module.compile()
    settings = config.optimizer
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=1.0,  # every step sets it from the schedule
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    return Part(name, module, optimizer)


def build_member(config: Config, method: Method, member: int, num_classes: int) -> Member:
    with initialising(config.seed, "member", member):
        network = networks.build_member(config.network, member)
        encoder = network.tail if config.structure == "branch" else network
        return Member(encoder, network.feature_dim, num_classes, method.prior_rows(num_classes))


def build_trunk(config: Config) -> nn.Module:
    with initialising(config.seed, "trunk"):
        return networks.build_member(config.network, 0).trunk


def build_discriminator(config: Config, method: Method, num_members: int, num_classes: int) -> Discriminator:
    assert method.redundancy is not None
    with initialising(config.seed, "discriminator"):
        return Discriminator(
            config.redundancy,
            num_members,
            max(feature_dims(config, num_members)),
            num_classes,
            method.redundancy.conditional,
            config.seed,
        )


def feature_dims(config: Config, num_members: int) -> list[int]:
    """D of every member, also of those that live elsewhere; no weights are allocated for them."""
    with torch.device("meta"):
        return [networks.build_member(config.network, member).feature_dim for member in range(num_members)]
