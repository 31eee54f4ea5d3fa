"""Builds the parts of an ensemble and its step from the configuration."""

from collections.abc import Sequence

import torch
from torch import nn

from dicedist.algorithm import networks
from dicedist.algorithm.adversary import Adversary
from dicedist.algorithm.member import Member
from dicedist.algorithm.messages import Carrier
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.randomness import initialising
from dicedist.algorithm.schedules import Schedules
from dicedist.algorithm.step import Step
from dicedist.config.schema import Config


def build_step(
    config: Config, hosted: Hosted, exchange: Carrier, steps_per_epoch: int, kind: type[Step] = Step
) -> Step:
    return kind(
        Method(config.method),
        hosted,
        exchange,
        Schedules.of(config),
        steps_per_epoch,
        config.seed,
        config.precision,
        sync_batch_norm=config.ensemble.sync_batch_norm,
        records_graphs=config.compile == "graphs",
    )


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
        module = build_adversary(config, method, num_members, num_classes).to(device)
        discriminator = Part("discriminator", module, module.build_optimizer())
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
        # If the first fused step overflows, the momentum stays uninitialised (torch 2.14), and the next step reads it.
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


def build_adversary(config: Config, method: Method, num_members: int, num_classes: int) -> Adversary:
    """The adversary of the compared members, with one slot for each, in their order."""
    assert method.adversarial is not None
    compared = method.compared(num_members)
    dims = feature_dims(config, num_members)
    widest = max(dims[member] for member in compared)
    with initialising(config.seed, "discriminator"):
        return method.adversarial.build_adversary(config.redundancy, len(compared), widest, num_classes, config.seed)


def feature_dims(config: Config, num_members: int) -> list[int]:
    """D of every member, including those on other ranks."""
    return [network.feature_dim for network in weightless(config, num_members)]


def weightless(config: Config, num_members: int) -> list[Network]:
    """Every member's network, to read its sizes; no weights are allocated."""
    with torch.device("meta"):
        if config.network.per_member is None:
            return [networks.build(config.network)] * num_members
        return [networks.build_member(config.network, member) for member in range(num_members)]


def check_members(config: Config, method: Method, num_members: int, num_hosts: int) -> None:
    """ValueError if the method does not suit its members or their ranks; called before any process group exists."""
    named = config.network.per_member
    if named is not None and len(named) != num_members:
        raise ValueError(f"network.per_member names {len(named)} networks for {num_members} members: name one for each")
    members = weightless(config, num_members)
    if config.network._target_ is not None:
        check_feature_dim(config, members[0])
    method.check(members)
    branch = config.structure == "branch"
    if branch and len(widths := {network.trunk_dim for network in members}) > 1:
        raise ValueError(f"members of trunk widths {sorted(widths)} cannot share a trunk: write structure=net")
    if num_hosts == 1:
        return
    if config.precision == "fp16" and (branch or method.shared(members) is not None):
        raise ValueError(
            "precision=fp16 scales the loss on each rank by itself, so ranks cannot share parameters: "
            "write precision=bf16, or use one process"
        )
    if branch and config.data.per_member:
        raise ValueError(
            "data.per_member=true gives the trunk other images on each rank, so its batch norms would diverge: "
            "write structure=net, or use one process"
        )


def check_feature_dim(config: Config, network: Network) -> None:
    """What a network of the user's own says of itself, compared with what it does to two images without values."""
    images = torch.empty(2, 3, config.data.size, config.data.size, device="meta")
    shape = tuple(network(images).shape)
    if shape != (2, network.feature_dim):
        raise ValueError(
            f"{config.network.label} makes {list(shape)} of 2 images, and feature_dim={network.feature_dim} says "
            f"[2, {network.feature_dim}]: set feature_dim to the number of features that it returns"
        )


def check_batch_of_one(config: Config) -> None:
    """An epoch may end with a single image, whose batch norms need more than one value for each channel."""
    images = torch.empty(1, 3, config.data.size, config.data.size, device="meta")
    for network in weightless(config, config.num_members)[: len(config.network.per_member or "1")]:
        try:
            network.train()(images)
        except ValueError as error:
            raise ValueError(
                f"the last batch of an epoch has 1 image, too few for the batch norms of {config.network.label} "
                f"({error}): write batch_size={config.batch_size + 1}, or any that leaves more"
            ) from error
