"""Builds the parts of an ensemble and its step from the configuration."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dicedist.algorithm import networks, trajectories
from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.counterpart import Counterpart
from dicedist.algorithm.grouped import why_not_grouped
from dicedist.algorithm.member import Member
from dicedist.algorithm.messages import Carrier, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.networks.layers import Layers
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.optimizers import build_optimizer
from dicedist.algorithm.parts import Hosted, Part, followed
from dicedist.algorithm.randomness import initialising
from dicedist.algorithm.schedules import Schedules
from dicedist.algorithm.step import Step
from dicedist.algorithm.targets import Loss
from dicedist.config.schema import Config

DECAY_OF_W = 0.9  # of the average of w that evaluation reads (docs/choices.md, 33)


def build_step(
    config: Config,
    hosted: Hosted,
    exchange: Carrier,
    steps_per_epoch: int,
    kind: type[Step] = Step,
    class_counts: Sequence[int] = (),
) -> Step:
    """class_counts: training inputs of each class, where loss.class_weights asks for them."""
    trajectory = trajectories.build(config.trajectory)
    return kind(
        Method(config.method),
        hosted,
        exchange,
        Schedules.of(config, trajectory.rate if trajectory else None),
        steps_per_epoch,
        config.seed,
        config.precision,
        sync_batch_norm=config.ensemble.sync_batch_norm,
        records_graphs=config.compile == "graphs",
        clip_norm=config.optimizer.clip_norm,
        pieces=config.optimizer.accumulate,
        loss=Loss.of(config.loss, class_counts, exchange.device),
        images_per_branch=config.structure == "branch" and config.data.per_member,
        batched=config.ensemble.batched is True,
    )


def build_hosted(
    config: Config,
    method: Method,
    members: Sequence[int],
    hosts_discriminator: bool,
    num_members: int,
    num_classes: int,
    device: torch.device,
    samples: bool = False,
) -> Hosted:
    """samples: the members are predictors, by their numbers among all samples of all members."""
    each = config.samples if samples else 1
    modules = {member: build_member(config, method, member // each, num_classes) for member in members}
    own = {
        member: learner(
            config.predictor_part(member) if samples else f"member-{member}",
            module,
            config,
            device,
            prefixed("encoder.", module.encoder.layers()),
        )
        for member, module in modules.items()
    }
    trunk, shared = None, None
    if members:
        if config.structure == "branch":
            trunk = build_trunk(config, device)
        if (module := build_shared(config, method, num_members, num_classes)) is not None:
            shared = learner("shared", module, config, device)
    discriminator = None
    if hosts_discriminator:
        assert method.counterpart is not None
        module = build_counterpart(config, method, num_members, num_classes).to(device)
        average = MovingAverage(followed(module), DECAY_OF_W) if method.estimator else None
        discriminator = Part(method.counterpart.part, module, module.build_optimizer(), average)
    companions = {} if samples else build_companions(config, method, own, num_members, num_classes, device)
    return Hosted(own, trunk, shared, discriminator, companions)


def build_companions(
    config: Config,
    method: Method,
    members: Mapping[int, Part],
    num_members: int,
    num_classes: int,
    device: torch.device,
) -> dict[int, Part]:
    """Those of the members hosted here, which get a second optimiser."""
    companions: dict[int, Part] = {}
    if not method.takes_lessons:
        return companions
    of_members = sizes(config, num_members, num_classes)
    for index, part in members.items():
        with initialising(config.seed, "companion", index):
            companion = method.companion(index, of_members)
        assert companion is not None and isinstance(part.module, Member)
        companion.to(device)
        companions[index] = Part(f"member-{index}-companion", companion, companion.build_optimizer())
        part.second = companion.build_second(part.module.encoder)
    return companions


def learner(
    name: str, module: nn.Module, config: Config, device: torch.device, backbone: Layers = (), behind: int = 0
) -> Part:
    """backbone, behind: as in `build_optimizer`."""
    module = module.to(device).to(memory_format=torch.channels_last)
    # If the first fused step overflows, SGD's momentum stays uninitialised (torch 2.14), and the next step reads it.
    optimizer = build_optimizer(config.optimizer, module, backbone, behind, fused=config.precision != "fp16")
    decay = config.optimizer.ema
    return Part(
        name, module, optimizer, None if decay is None else MovingAverage(module, decay, config.optimizer.ema_warmup)
    )


def prefixed(path: str, names: Layers) -> Layers:
    return [[path + name for name in layer] for layer in names]


def build_member(config: Config, method: Method, member: int, num_classes: int) -> Member:
    with initialising(config.seed, "member", member):
        network = networks.build_member(config.network, member)
        encoder = network.branch() if config.structure == "branch" else network
        for stage in encoder.children():
            compile_stage(stage, config.compile)
        return Member(encoder, num_classes, method.prior_rows(num_classes))


def build_trunk(config: Config, device: torch.device) -> Part:
    with initialising(config.seed, "trunk"):
        network = networks.build_member(config.network, 0)
    compile_stage(network.trunk, config.compile)
    halves = [[name.partition(".")[2] for name in layer if name.startswith("trunk.")] for layer in network.layers()]
    own = [layer for layer in halves if layer]
    return learner("trunk", network.trunk, config, device, own, behind=len(halves) - len(own))


def compile_stage(stage: nn.Module, how: bool | str) -> None:
    if how:
        stage.compile(mode="reduce-overhead" if how == "graphs" else None)


def build_shared(config: Config, method: Method, num_members: int, num_classes: int) -> nn.Module | None:
    with initialising(config.seed, "shared"):
        return method.shared(weightless(config, num_members), num_classes)


def build_counterpart(config: Config, method: Method, num_members: int, num_classes: int) -> Counterpart:
    """The counterpart of the compared members, with one place for each, in their order."""
    assert method.counterpart is not None
    every = sizes(config, num_members, num_classes)
    with initialising(config.seed, method.counterpart.part):
        return method.counterpart.build_counterpart(config, [every[member] for member in method.compared(num_members)])


def feature_dims(config: Config, num_members: int) -> list[int]:
    """D of every member, including those on other ranks."""
    return [network.feature_dim for network in weightless(config, num_members)]


def sizes(config: Config, num_members: int, num_classes: int) -> list[Sizes]:
    """The sizes of every member, including those on other ranks."""
    pixels, asks_maps = math.prod(input_shape(config)), Method(config.method).asks_maps
    networks_ = weightless(config, num_members)
    maps = {id(network): map_shape(config, network) if asks_maps else None for network in networks_}
    return [Sizes(network.feature_dim, pixels, num_classes, maps[id(network)]) for network in networks_]


def map_shape(config: Config, network: Network) -> tuple[int, int, int] | None:
    """Channels, rows and columns before pooling; nothing is computed."""
    map_BCHW = network.read(torch.empty(2, *input_shape(config), device="meta"))[2]
    if map_BCHW is None:
        return None
    _, channels, rows, columns = map_BCHW.shape
    return channels, rows, columns


def weightless(config: Config, num_members: int) -> list[Network]:
    """Every member's network, to read its sizes; no weights are allocated."""
    with torch.device("meta"):
        if config.network.per_member is None:
            return [networks.build(config.network)] * num_members
        return [networks.build_member(config.network, member) for member in range(num_members)]


def input_shape(config: Config) -> tuple[int, ...]:
    """The shape of one input, an image or a vector, as a network sees it."""
    size, inputs = config.data.size, config.network.inputs
    return (3, size, size) if inputs is None else (inputs,)


def check_members(config: Config, method: Method, num_members: int, num_hosts: int, num_shares: int) -> None:
    """ValueError if the method does not suit its members or their ranks; called before any process group exists.

    num_hosts, num_shares: the ranks that host members, and those that divide the discriminator.
    """
    named = config.network.per_member
    if named is not None and len(named) != num_members:
        raise ValueError(f"network.per_member names {len(named)} networks for {num_members} members: name one for each")
    members = weightless(config, num_members)
    for network in {id(member): member for member in members}.values():
        check_feature_dim(config, network)
    method.check(members)
    method.check_maps(sizes(config, num_members, num_classes=1))
    if config.loss.mixup or config.loss.cutmix:
        method.refuse_mixed()
    if config.optimizer.accumulate > 1 and method.differentiates_pixels:
        raise ValueError(f"method={method.name} differentiates whole batches by pixels: leave optimizer.accumulate out")
    if config.loss.cutmix and config.network.inputs is not None:
        raise ValueError("loss.cutmix cuts images, and the data are vectors: write loss.mixup instead")
    branch = config.structure == "branch"
    if branch and len(widths := {network.trunk_dim for network in members}) > 1:
        raise ValueError(f"members of trunk widths {sorted(widths)} cannot share a trunk: write structure=net")
    check_settings(config, method)
    if config.ensemble.batched is True and (reason := why_not_batched(config)):
        raise ValueError(f"ensemble.batched=true: {reason}; write ensemble.batched=false")
    if num_shares > 1:
        check_shares(config, method, num_members, num_shares)
    if method.asks_teacher and config.teacher.run is None:
        raise ValueError(
            f"method={method.name} learns from the ensemble of a run: write teacher.run=runs/NAME, or "
            "`dicedist distill run=runs/NAME network=NAME`"
        )
    if config.teacher.run is not None and not method.asks_teacher:
        raise ValueError(f"teacher.run={config.teacher.run}: method={method.name} has no teacher, write method=distill")
    if num_hosts == 1:
        return
    if config.precision == "fp16" and (branch or method.shared(members, num_classes=1) is not None):
        raise ValueError(
            "precision=fp16 scales the loss on each rank by itself, so ranks cannot share parameters: "
            "write precision=bf16, or use one process"
        )


def why_not_batched(config: Config) -> str | None:
    """Why members of one device cannot run as one network, in a few words; None if they can. Costs a few forwards."""
    for given, reason in (
        (config.compile, "one network of all members is not compiled (compile=false)"),
        (config.trajectory["kind"] != "none", f"trajectory.kind={config.trajectory['kind']} follows each member alone"),
    ):
        if given:
            return reason
    count = len(config.network.per_member) if config.network.per_member else 2  # members alike: two tell of all
    with initialising(config.seed, "grouped"):
        members = [networks.build_member(config.network, nth) for nth in range(count)]
        return why_not_grouped(members, input_shape(config))


def check_shares(config: Config, method: Method, num_members: int, num_shares: int) -> None:
    """ValueError if so many ranks cannot divide the discriminator."""
    assert method.counterpart is not None
    pairs = math.comb(len(method.compared(num_members)), 2)
    compared = min(pairs, config.redundancy.budget or pairs)
    with torch.device("meta"):
        divisible = build_counterpart(config, method, num_members, num_classes=2).divisible
    if not divisible:
        raise ValueError(
            f"method={method.name} has a {method.counterpart.part} that one rank holds: write redundancy.ranks=1"
        )
    if num_shares > compared:
        raise ValueError(
            f"redundancy.ranks={config.redundancy.ranks}: {num_shares} ranks cannot divide {compared} pairs of "
            f"members: write redundancy.ranks={compared}"
        )


def check_settings(config: Config, method: Method) -> None:
    """ValueError if the method cannot be trained in this way, on any number of ranks."""
    for needs, what in (
        (method.differentiates_pixels, "needs second derivatives, which are lost here"),
        (method.takes_lessons, "differentiates a batch twice, for two optimisers, which cannot be done here"),
    ):
        for given, instead in (
            (config.compile, "compile=false"),
            (config.ensemble.replicas > 1, "ensemble.replicas=1"),
            (config.precision == "fp16", "precision=bf16"),
            (config.optimizer.accumulate > 1, "optimizer.accumulate=1"),
        ):
            if needs and given:
                raise ValueError(f"method={method.name} {what}: write {instead}")
    if method.counterpart is not None and method.counterpart.fusion and config.optimizer.ema is not None:
        raise ValueError(f"method={method.name} fuses members, not their averages: write optimizer.ema=null")
    check_trajectory(config, method)
    if method.asks_average and config.optimizer.ema is None:
        raise ValueError(f"method={method.name} teaches by averaged weights: write optimizer.ema=0.999")
    separate = config.structure == "branch" and config.data.per_member
    if separate and config.optimizer.accumulate > 1:
        raise ValueError("data.per_member=true with a shared trunk takes whole batches: write optimizer.accumulate=1")
    if method.weighing is None:
        return
    if config.data.split == "full":
        raise ValueError(f"method={method.name} weighs members on held-out images: write data.split=holdout")
    if config.evaluate.every_epochs != 1:
        raise ValueError(f"method={method.name} weighs members after every epoch: write evaluate.every_epochs=1")


def check_trajectory(config: Config, method: Method) -> None:
    kind, name = trajectories.build(config.trajectory), config.trajectory["kind"]
    if kind is None:
        return
    if [*config.method.terms] != ["cross_entropy"]:
        raise ValueError(f"trajectory.kind={name} follows cross-entropy alone: write method={name}")
    for given, instead in (
        (config.structure != "net", "structure=net"),
        (config.ensemble.replicas > 1, "ensemble.replicas=1"),
        (config.precision == "fp16", "precision=bf16"),
        (bool(config.compile), "compile=false"),
        (config.optimizer.accumulate > 1, "optimizer.accumulate=1"),
        (config.optimizer.ema is not None, "optimizer.ema=null"),
        (kind.tunes and config.data.split == "full", "data.split=holdout, or trajectory.scale=0.5"),
    ):
        if given:
            raise ValueError(f"trajectory.kind={name} cannot be followed so: write {instead}")
    length = config.schedules.reference_epochs if config.schedules.scale else config.epochs
    if kind.moments and kind.moments[-1] > length:
        raise ValueError(
            f"trajectory.samples={kind.samples}: the last is due after epoch {kind.moments[-1]:g} of {length}; write "
            "shorter cycles, fewer samples, or a longer run (schedules.reference_epochs, if schedules.scale)"
        )


def check_feature_dim(config: Config, network: Network) -> None:
    """What a network says of itself, compared with what it does to two inputs without values."""
    try:
        shape = tuple(network(torch.empty(2, *input_shape(config), device="meta")).shape)
    except (AssertionError, RuntimeError, ValueError) as error:
        if network.origin.inputs is None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{config.network.label} cannot read images of data.size={config.data.size} ({reason}): "
            f"write data.size={network.origin.inputs.size}"
        ) from error
    if shape != (2, network.feature_dim):
        raise ValueError(
            f"{config.network.label} makes {list(shape)} of 2 inputs, and feature_dim={network.feature_dim} says "
            f"[2, {network.feature_dim}]: set feature_dim to the number of features that it returns"
        )


def check_batch_of_one(config: Config) -> None:
    """An epoch may end with a single input, whose batch norms need more than one value for each channel."""
    alone = torch.empty(1, *input_shape(config), device="meta")
    for network in weightless(config, config.num_members)[: len(config.network.per_member or "1")]:
        try:
            network.train()(alone)
        except ValueError as error:
            raise ValueError(
                f"the last batch of an epoch has 1 input, too few for the batch norms of {config.network.label} "
                f"({error}): write batch_size={config.batch_size + 1}, or any that leaves more"
            ) from error
