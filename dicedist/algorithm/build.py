"""Build the parts of an ensemble and its step from the configuration and the plan of a run."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature

import torch
from torch import nn

from dicedist.algorithm import networks, trajectories
from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.companion import TaughtMember
from dicedist.algorithm.counterpart import Counterpart
from dicedist.algorithm.encoders import Encoders
from dicedist.algorithm.member import Member
from dicedist.algorithm.messages import Carrier, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.networks.layers import Layers
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.optimizers import build_optimizer
from dicedist.algorithm.parts import Hosted, Part, followed
from dicedist.algorithm.precision import Precision
from dicedist.algorithm.randomness import initializing
from dicedist.algorithm.schedules import Schedules
from dicedist.algorithm.step import Step
from dicedist.algorithm.targets import Loss
from dicedist.algorithm.trajectories import Clock, Surroundings, Trajectories
from dicedist.config.plan import Plan
from dicedist.config.schema import Config

DECAY_OF_W = 0.9  # of the average of w that evaluation reads (docs/choices.md, 33)


@dataclass(frozen=True)
class Extent:
    """The size of the data and the length of a training."""

    num_classes: int
    steps_per_epoch: int
    total_steps: int = 10**9
    class_counts: Sequence[int] = ()  # training inputs of each class; empty unless loss.class_weights needs them

    @property
    def num_inputs(self) -> int:
        return sum(self.class_counts)


def build_step(
    config: Config,
    method: Method,
    plan: Plan,
    hosted: Hosted,
    exchange: Carrier,
    extent: Extent,
    teacher: nn.Module | None = None,
) -> tuple[Step, Trajectories]:
    """Build the step of this rank and the trajectories of its members. teacher: for methods that distill one."""
    kind = trajectories.build(config.trajectory)
    schedules = Schedules(config, kind.rate if kind else None, extent.steps_per_epoch)
    paths = Trajectories(
        kind,
        hosted,
        Clock(schedules.pace, extent.steps_per_epoch),
        extent.total_steps,
        Surroundings(extent.num_inputs, config.optimizer.weight_decay),
        config.seed,
    )
    encoders = Encoders(config, method, plan, hosted, exchange, teacher, paths.encoders)
    loss = Loss.of(config.loss, config.seed, plan.input_shape, extent.class_counts, exchange.device)
    return Step(method, hosted, exchange, encoders, schedules, loss), paths


def build_hosted(
    config: Config,
    method: Method,
    plan: Plan,
    members: Sequence[int],
    hosts_discriminator: bool,
    num_classes: int,
    device: torch.device,
) -> Hosted:
    """Build the parts of a rank that hosts these members, and perhaps the discriminator."""
    every = sizes(config, method, plan, num_classes)
    own = {member: member_part(config, method, plan, member, every, device) for member in members}
    trunk, shared, frozen = None, None, None
    if members:
        if config.network.freezes_trunk:
            frozen = replace(build_trunk(config, plan, device), average=None)
        elif config.structure == "branch":
            trunk = build_trunk(config, plan, device)
        with initializing(config.seed, "shared"):
            common = method.shared(weightless(config, plan), num_classes)
        shared = None if common is None else learner("shared", common, config, device)
    discriminator = None
    if hosts_discriminator:
        assert method.counterpart is not None
        module = build_counterpart(config, method, plan, num_classes).to(device)
        average = MovingAverage(followed(module), DECAY_OF_W) if method.estimator else None
        discriminator = Part(method.counterpart.part, module, module.build_optimizer(), average)
    return Hosted(own, trunk, shared, discriminator, Precision(config.precision, device), frozen)


def member_part(
    config: Config, method: Method, plan: Plan, index: int, every: Sequence[Sizes], device: torch.device
) -> Part:
    """Build the part of one member. every: the sizes of all members."""
    member = build_member(config, method, plan, index, every[index].classes)
    backbone = [[f"encoder.{name}" for name in layer] for layer in member.encoder.layers()]
    part = learner(f"member-{index}", member, config, device, backbone)
    with initializing(config.seed, "companion", index):
        companion = method.companion(index, every)
    if companion is None:
        return part
    taught_by = Part(f"{part.name}-companion", companion.to(device), companion.build_optimizer())
    second = companion.build_second(member.encoder)
    return TaughtMember(
        part.name, part.module, part.optimizer, part.average, part.clip_norm, companion=taught_by, second=second
    )


def learner(
    name: str, module: nn.Module, config: Config, device: torch.device, backbone: Layers = (), behind: int = 0
) -> Part:
    """Build a part with its optimizer and moving average. backbone, behind: as in `build_optimizer`."""
    module = module.to(device).to(memory_format=torch.channels_last)
    # If the first fused step overflows, SGD's momentum stays uninitialized (torch 2.14), and the next step reads it.
    optimizer = build_optimizer(config.optimizer, module, backbone, behind, fused=config.precision != "fp16")
    decay, clip_norm = config.optimizer.ema, config.optimizer.clip_norm
    average = None if decay is None else MovingAverage(module, decay, config.optimizer.ema_warmup)
    return Part(name, module, optimizer, average, clip_norm)


def build_member(config: Config, method: Method, plan: Plan, member: int, num_classes: int) -> Member:
    with initializing(config.seed, "member", member):
        network = networks.build_member(config.network, member, plan.input_shape)
        encoder = network.branch() if config.structure == "branch" else network
        for stage in encoder.children():
            compile_stage(stage, config.compile)
        return Member(encoder, num_classes, method.prior_rows(num_classes))


def build_trunk(config: Config, plan: Plan, device: torch.device) -> Part:
    with initializing(config.seed, "trunk"):
        network = networks.build_member(config.network, 0, plan.input_shape)
    compile_stage(network.trunk, config.compile)
    halves = [[name.partition(".")[2] for name in layer if name.startswith("trunk.")] for layer in network.layers()]
    own = [layer for layer in halves if layer]
    return learner("trunk", network.trunk, config, device, own, behind=len(halves) - len(own))


def compile_stage(stage: nn.Module, how: bool | str) -> None:
    if how:
        # Shapes are fixed, and stages do not count against each other's limit of recompilations.
        mode = "reduce-overhead" if how == "graphs" else None
        isolated = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
        if not isolated:  # older releases, such as 2.10: a limit that all stages share
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        stage.compile(mode=mode, dynamic=False, **isolated)


def build_counterpart(config: Config, method: Method, plan: Plan, num_classes: int) -> Counterpart:
    """Build the counterpart of the compared members, with one place for each, in their order."""
    assert method.counterpart is not None
    every = sizes(config, method, plan, num_classes)
    compared = [every[member] for member in method.compared(plan.num_members)]
    config = replace(config, redundancy=replace(config.redundancy, max_pairs=plan.max_pairs))
    with initializing(config.seed, method.counterpart.part):
        return method.counterpart.build_counterpart(config, compared)


def feature_dims(config: Config, plan: Plan) -> list[int]:
    """Return D of every member, including those on other ranks."""
    return [network.feature_dim for network in weightless(config, plan)]


def read_shape(config: Config, plan: Plan) -> tuple[int, ...]:
    """Return the shape of one input of a step: an image, a vector, or the output of a frozen trunk."""
    if not config.network.freezes_trunk:
        return plan.input_shape
    inputs = torch.empty(2, *plan.input_shape, device="meta")
    return tuple(weightless(config, plan)[0].eval().trunk(inputs).shape[1:])


def sizes(config: Config, method: Method, plan: Plan, num_classes: int) -> list[Sizes]:
    """Return the sizes of every member, including those on other ranks."""
    pixels, members = math.prod(plan.input_shape), weightless(config, plan)
    maps = {id(network): map_shape(network, plan) if "map" in method.keeps else None for network in members}
    return [Sizes(network.feature_dim, pixels, num_classes, maps[id(network)]) for network in members]


def map_shape(network: Network, plan: Plan) -> tuple[int, int, int] | None:
    """Return channels, rows and columns before pooling; nothing is computed."""
    map_BCHW = network.outputs(torch.empty(2, *plan.input_shape, device="meta")).map_BCHW
    if map_BCHW is None:
        return None
    _, channels, rows, columns = map_BCHW.shape
    return channels, rows, columns


def weightless(config: Config, plan: Plan) -> list[Network]:
    """Return every member's network, to read its sizes; no weights are allocated."""
    with torch.device("meta"), warnings.catch_warnings():
        # A function of the user may load weights, which the meta device ignores.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        if config.network.per_member is None:
            return [networks.build(config.network, plan.input_shape)] * plan.num_members
        return [networks.build_member(config.network, member, plan.input_shape) for member in range(plan.num_members)]
