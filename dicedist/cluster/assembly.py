"""The step of one rank: the parts that the placement gives it, and the exchange that connects them to other ranks."""

from collections.abc import Sequence

import torch

from dicedist.algorithm.build import build_hosted, build_step, sizes
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.step import Step
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import Placement
from dicedist.cluster.world import World
from dicedist.config.schema import Config


def assemble(
    config: Config,
    placement: Placement,
    world: World,
    num_classes: int,
    steps_per_epoch: int,
    kind: type[Step] = Step,
    class_counts: Sequence[int] = (),
) -> tuple[Step, Exchange]:
    """All ranks call this, because it makes the groups of the exchange."""
    method, size = Method(config.method), placement.num_members
    members, hosts_w = placement.members_on(world.rank), world.rank in placement.discriminators
    hosted = build_hosted(config, method, members, hosts_w, size, num_classes, world.device)
    traffic = method.traffic(sizes(config, size, num_classes), num_classes, config.redundancy)
    wire = torch.bfloat16 if config.distributed.wire == "bf16" else None
    exchange = Exchange.between(placement, world.rank, world.device, traffic, wire)
    if hosted.w is not None:
        hosted.w.division = exchange.division
    return build_step(config, hosted, exchange, steps_per_epoch, kind, class_counts), exchange
