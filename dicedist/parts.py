"""The parts of an ensemble that this rank hosts, built from the config: members, what they share, the discriminator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dicedist import networks
from dicedist.config import Config
from dicedist.discriminator import Discriminator
from dicedist.member import Member
from dicedist.networks import Network
from dicedist.objectives import Method
from dicedist.placement import Placement
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
    trunk: Part | None  # of branches
    shared: Part | None  # the method's own: a gate, an attention
    discriminator: Part | None

    @property
    def parts(self) -> list[Part]:
        return [*self.learners, *([self.discriminator] if self.discriminator else [])]

    @property
    def learners(self) -> list[Part]:
        """What the members' losses train."""
        return [*self.members.values(), *self.common]

    @property
    def common(self) -> list[Part]:
        """What all members train together, replicated on each rank that hosts some."""
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
    hosted_members = {
        member: learner(f"member-{member}", build_member(config, method, member, num_classes), config, device)
        for member in members
    }
    common = {"trunk": build_trunk(config), "shared": build_shared(config, method, num_members)} if members else {}
    shared = {name: learner(name, module, config, device) for name, module in common.items() if module is not None}
    discriminator = None
    if hosts_discriminator:
        module = build_discriminator(config, method, num_members, num_classes).to(device)
        optimizer = torch.optim.RMSprop(module.network.parameters(), lr=config.redundancy.lr)
        discriminator = Part("discriminator", module, optimizer)
    return Hosted(hosted_members, shared.get("trunk"), shared.get("shared"), discriminator)


def learner(name: str, module: nn.Module, config: Config, device: torch.device) -> Part:
    module = module.to(device).to(memory_format=torch.channels_last)
    settings = config.optimizer
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=1.0,  # every step sets it from the schedule
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        # A fused first step that overflows leaves its momentum uninitialised (torch 2.14), and the next one reads it.
        fused=config.precision != "fp16",
    )
    return Part(name, module, optimizer)


def build_member(config: Config, method: Method, member: int, num_classes: int) -> Member:
    with initialising(config.seed, "member", member):
        network = networks.build_member(config.network, member)
        encoder = network.branch() if config.structure == "branch" else network
        for stage in encoder.children():
            compile_stage(stage, config.compile)
        return Member(encoder, num_classes, method.prior_rows(num_classes))


def build_trunk(config: Config) -> nn.Module | None:
    if config.structure != "branch":
        return None
    with initialising(config.seed, "trunk"):
        trunk = networks.build_member(config.network, 0).trunk
    compile_stage(trunk, config.compile)
    return trunk


def compile_stage(stage: nn.Module, how: bool | str) -> None:
    if how:
        stage.compile(mode="reduce-overhead" if how == "graphs" else None)


def build_shared(config: Config, method: Method, num_members: int) -> nn.Module | None:
    with initialising(config.seed, "shared"):
        return method.shared(weightless(config, num_members))


def build_discriminator(config: Config, method: Method, num_members: int, num_classes: int) -> Discriminator:
    """For the members that are compared: its slots are theirs, in their order."""
    assert method.redundancy is not None
    compared = method.compared(num_members)
    dims = feature_dims(config, num_members)
    with initialising(config.seed, "discriminator"):
        return Discriminator(
            config.redundancy,
            len(compared),
            max(dims[member] for member in compared),
            num_classes,
            method.redundancy.conditional,
            config.seed,
        )


def feature_dims(config: Config, num_members: int) -> list[int]:
    """D of every member, also of those that live elsewhere."""
    return [network.feature_dim for network in weightless(config, num_members)]


def weightless(config: Config, num_members: int) -> list[Network]:
    """Every member's network, for its sizes: no weights are allocated."""
    with torch.device("meta"):
        if config.network.per_member is None:
            return [networks.build(config.network)] * num_members
        return [networks.build_member(config.network, member) for member in range(num_members)]


def check(config: Config, method: Method, placement: Placement) -> None:
    """Before any process group exists: whether the method, its members and their placement suit each other."""
    num_members, named = placement.num_members, config.network.per_member
    if named is not None and len(named) != num_members:
        raise ValueError(f"network.per_member names {len(named)} networks for {num_members} members: name one for each")
    members = weightless(config, num_members)
    method.check(members)
    branch = config.structure == "branch"
    if branch and len(widths := {network.trunk_dim for network in members}) > 1:
        raise ValueError(f"members of trunk widths {sorted(widths)} cannot share a trunk: write structure=net")
    if len(placement.member_ranks) == 1:
        return
    if config.precision == "fp16" and (branch or method.shared(members) is not None):
        raise ValueError(
            "precision=fp16 scales the loss on each rank by itself, so ranks cannot share parameters: "
            "write precision=bf16, or use one process"
        )
    if branch and config.data.per_member:
        raise ValueError(
            "data.per_member=true gives the trunk other images on each rank, so its batch norms would part: "
            "write structure=net, or use one process"
        )
