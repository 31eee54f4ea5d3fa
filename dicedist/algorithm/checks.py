"""Check that networks, method and ranks fit together, before any process group exists."""

import math

import torch

from dicedist.algorithm import networks, trajectories
from dicedist.algorithm.build import build_counterpart, sizes, weightless
from dicedist.algorithm.grouped import why_not_grouped
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.objectives.distill import TeacherLogits
from dicedist.algorithm.randomness import initializing
from dicedist.config.plan import Plan
from dicedist.config.schema import Config


def check_members(config: Config, method: Method, plan: Plan, num_hosts: int, num_shares: int) -> None:
    """Raise a ValueError if the method does not suit its members or their ranks.

    num_hosts: ranks that host members. num_shares: ranks that divide the discriminator.
    """
    named = config.network.per_member
    if named is not None and len(named) != plan.num_members:
        raise ValueError(
            f"network.per_member names {len(named)} networks for {plan.num_members} members: name one for each"
        )
    members = weightless(config, plan)
    for network in {id(member): member for member in members}.values():
        check_feature_dim(config, plan, network)
    method.check(config, members, sizes(config, method, plan, num_classes=1))
    if config.loss.cutmix and plan.reads_vectors:
        raise ValueError("loss.cutmix cuts images, and the data are vectors: write loss.mixup instead")
    branch = config.structure == "branch"
    if branch and len(widths := {network.trunk_dim for network in members}) > 1:
        raise ValueError(f"members of trunk widths {sorted(widths)} cannot share a trunk: write structure=net")
    if branch and config.data.per_member and config.optimizer.accumulate > 1:
        raise ValueError("data.per_member=true with a shared trunk takes whole batches: write optimizer.accumulate=1")
    check_trajectory(config)
    if plan.grouped is True and (reason := why_not_batched(config, plan)):
        raise ValueError(f"ensemble.batched=true: {reason}; write ensemble.batched=false")
    if num_shares > 1 and (reason := why_not_shared(config, method, plan, num_shares)):
        raise ValueError(reason)
    if config.teacher.run is not None and TeacherLogits not in method.probes:
        raise ValueError(f"teacher.run={config.teacher.run}: method={method.name} has no teacher, write method=distill")
    trains_trunk = branch and not config.network.freezes_trunk
    shares_parameters = trains_trunk or method.shared(members, num_classes=1) is not None
    if config.precision == "fp16" and num_hosts > 1 and shares_parameters:
        raise ValueError(
            "precision=fp16 has a loss scale per rank, so ranks cannot share parameters: "
            "write precision=bf16, or use one process"
        )


def why_not_batched(config: Config, plan: Plan) -> str | None:
    """Return why the members of one device cannot run as one network, in a few words; None if they can.

    The check runs a few forward passes.
    """
    for given, reason in (
        (config.compile, "a grouped network cannot be compiled (compile=false)"),
        (config.trajectory["kind"] != "none", f"trajectory.kind={config.trajectory['kind']} follows each member alone"),
    ):
        if given:
            return reason
    count = len(config.network.per_member) if config.network.per_member else 2  # of equal members two are enough
    with initializing(config.seed, "grouped"):
        members = [networks.build_member(config.network, nth, plan.input_shape) for nth in range(count)]
        return why_not_grouped(members, plan.input_shape)


def why_not_shared(config: Config, method: Method, plan: Plan, num_shares: int) -> str | None:
    """Return why this many ranks cannot divide the discriminator, and what to write instead; None if they can."""
    assert method.counterpart is not None
    pairs = math.comb(len(method.compared(plan.num_members)), 2)
    compared = min(pairs, plan.max_pairs or pairs)
    with torch.device("meta"):
        divisible = build_counterpart(config, method, plan, num_classes=2).divisible
    if not divisible:
        return f"method={method.name} has a {method.counterpart.part} that one rank holds: write redundancy.ranks=1"
    if num_shares <= compared:
        return None
    return (
        f"redundancy.ranks={config.redundancy.ranks}: {num_shares} ranks cannot divide {compared} pairs of members: "
        f"write redundancy.ranks={compared}"
    )


def check_trajectory(config: Config) -> None:
    kind, name = trajectories.build(config.trajectory), config.trajectory["kind"]
    if kind is None:
        return
    if [*config.method.terms] != ["cross_entropy"] or config.method.targets:
        raise ValueError(f"trajectory.kind={name} follows cross-entropy alone: write method={name}")
    for given, instead in (
        (config.structure != "net", "structure=net"),
        (config.ensemble.replicas > 1, "ensemble.replicas=1"),
        (config.precision == "fp16", "precision=bf16"),
        (bool(config.compile), "compile=false"),
        (config.optimizer.accumulate > 1, "optimizer.accumulate=1"),
        (config.optimizer.ema is not None, "optimizer.ema=null"),
        (kind.plain_sgd and config.optimizer.name != "sgd", "optimizer.name=sgd"),
        (kind.plain_sgd and config.optimizer.momentum != 0, "optimizer.momentum=0"),
        (kind.tunes and config.data.split == "full", "data.split=holdout, or trajectory.scale=0.5"),
    ):
        if given:
            raise ValueError(f"trajectory.kind={name} does not work with these settings: write {instead}")
    length = config.schedules.reference_epochs if config.schedules.scale else config.epochs
    if kind.moments and kind.moments[-1] > length:
        raise ValueError(
            f"trajectory.samples={kind.samples}: the last is due after epoch {kind.moments[-1]:g} of {length}; write "
            "shorter cycles, fewer samples, or a longer run (schedules.reference_epochs, if schedules.scale)"
        )


def check_feature_dim(config: Config, plan: Plan, network: Network) -> None:
    """Raise a ValueError if a network does not return `feature_dim` features for each of two inputs."""
    try:
        shape = tuple(network(torch.empty(2, *plan.input_shape, device="meta")).shape)
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
            f"{config.network.label} returns {list(shape)} for 2 inputs, but feature_dim={network.feature_dim} means "
            f"[2, {network.feature_dim}]: set feature_dim to the number of features that it returns"
        )


def check_batch_of_one(config: Config, plan: Plan) -> None:
    """Raise a ValueError if the last batch of an epoch has one input and batch norms need more."""
    alone = torch.empty(1, *plan.input_shape, device="meta")
    for network in weightless(config, plan)[: len(config.network.per_member or "1")]:
        try:
            network.train()(alone)
        except ValueError as error:
            raise ValueError(
                f"the last batch of an epoch has 1 input, too few for the batch norms of {config.network.label} "
                f"({error}): write batch_size={config.batch_size + 1}, or any that leaves more"
            ) from error
