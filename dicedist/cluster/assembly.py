"""The step of one rank: the parts that the placement gives it, and the exchange that connects them to other ranks."""

import torch
from torch import nn

from dicedist.algorithm.build import Extent, build_hosted, build_step, sizes
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.step import Step
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import Placement, place
from dicedist.cluster.world import FOREVER, World
from dicedist.config.plan import Plan
from dicedist.config.schema import Config


def placed(config: Config, method: Method, num_ranks: int) -> Placement:
    """Place the parts of a training on the ranks of one node."""
    needs_w = method.counterpart is not None
    return place(num_ranks, config.ensemble.size, needs_w, config.ensemble.replicas, ranks_of_w=config.redundancy.ranks)


def connect(
    config: Config, method: Method, plan: Plan, placement: Placement, world: World, num_classes: int
) -> Exchange:
    """Build the exchange. All ranks call this, because it creates process groups."""
    traffic = method.traffic(sizes(config, method, plan, num_classes), num_classes, config.redundancy)
    wire = torch.bfloat16 if config.distributed.wire == "bf16" else None
    return Exchange(placement, world.rank, world.device, traffic, wire, FOREVER)


def host(config: Config, method: Method, plan: Plan, exchange: Exchange, num_classes: int) -> Hosted:
    """Build the parts that the placement gives this rank."""
    placement, rank = exchange.placement, exchange.rank
    members, hosts_w = placement.members_on(rank), rank in placement.discriminators
    hosted = build_hosted(config, method, plan, members, hosts_w, num_classes, exchange.device)
    if hosted.w is not None:
        hosted.w.division = exchange.division
    return hosted


def assemble(
    config: Config,
    method: Method,
    plan: Plan,
    placement: Placement,
    world: World,
    extent: Extent,
    teacher: nn.Module | None = None,
) -> Step:
    """Build the exchange, the parts and the step. All ranks call this."""
    exchange = connect(config, method, plan, placement, world, extent.num_classes)
    hosted = host(config, method, plan, exchange, extent.num_classes)
    return build_step(config, method, plan, hosted, exchange, extent, teacher)[0]
