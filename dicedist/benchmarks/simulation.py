"""The time of a step against members, nodes and links, computed from the times of a device and the bytes of a step.

This is a model, not a measurement. Every part has its own device. The link between a node and the others carries one
message at a time. The times of the discriminator w grow with the pairs of members that it compares, and are divided by
its ranks, as few as hide its learning behind the members. `bench scaling` measures the same schedule over loopback;
`bench step` measures the times of a device, which can be entered here.

    python -m dicedist.bench scaling --simulate simulate.forward=0.012 simulate.gbit=10,100 batch_size=256
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, NamedTuple

import torch

from dicedist.algorithm.build import build_counterpart, feature_dims
from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import Placement, place
from dicedist.config import Config, nearest
from dicedist.config.plan import Plan

BYTES, CHECKSUM = 4, 8
PAIRS_OF_FOUR = 6
NUM_CLASSES = 100


@dataclass(frozen=True)
class Assumed:
    """Seconds on one device; the times of w are for four members. The defaults describe no particular device."""

    members: tuple[int, ...] = (4, 8, 16, 32)
    nodes: tuple[int, ...] = (1, 4)
    gbit: tuple[float, ...] = (10.0, 100.0)  # of the link between a node and the others, in each direction
    gbit_inside: float = 200.0  # of the link between a device and the others of its node
    latency: float = 50e-6  # of a message between nodes
    latency_inside: float = 10e-6
    forward: float = 0.010
    backward: float = 0.020
    gradient: float = 0.001
    learn: float = 0.010


class StepTime(NamedTuple):
    gather: float
    scatter: float
    step: float
    waits_for: str  # members | w: the part that sets the pace


def assumed(words: Sequence[str]) -> Assumed:
    """Parse words like simulate.gbit=10,100."""
    known = {field.name: field.default for field in fields(Assumed)}
    chosen: dict[str, Any] = {}
    for word in words:
        name, _, text = word.removeprefix("simulate.").partition("=")
        if name not in known:
            raise ValueError(f"simulate.{name}: there is no such key{nearest(name, list(known))}")
        like = known[name]
        several = isinstance(like, tuple)
        kind = type(like[0]) if isinstance(like, tuple) else float
        try:
            values = [kind(value) for value in (text.split(",") if several else [text])]
        except ValueError:
            values = [0]
        if min(values) <= 0:
            raise ValueError(f"{word}: write {'numbers above 0, as 1,2' if several else 'a number above 0'}")
        chosen[name] = tuple(values) if several else values[0]
    return Assumed(**chosen)


def simulate(config: Config, times: Assumed) -> list[dict[str, Any]]:
    rows, alone = [], times.forward + times.backward
    for num_members, num_nodes, gbit in product(times.members, times.nodes, times.gbit):
        if num_nodes > num_members + 1 or (num_nodes == 1 and gbit != times.gbit[0]):
            continue
        hidden = ranks_that_hide(compared_pairs(config, num_members) / PAIRS_OF_FOUR * times.learn, alone)
        for ranks_of_w in sorted({1, hidden}):
            found = step_time(config, times, num_members, num_nodes, gbit, ranks_of_w)
            rows.append({
                "members": num_members, "ranks of w": ranks_of_w, "nodes": num_nodes,
                "Gbit/s between": gbit if num_nodes > 1 else "-", "gather, ms": 1e3 * found.gather,
                "scatter, ms": 1e3 * found.scatter, "step, ms": 1e3 * found.step,
                "to independent": found.step / alone, "waits for": found.waits_for,
            })  # fmt: skip
    return rows


def compared_pairs(config: Config, num_members: int) -> int:
    pairs = math.comb(num_members, 2)
    return min(pairs, config.redundancy.budget or pairs)


def ranks_that_hide(learn: float, members: float) -> int:
    """Return the fewest ranks of w whose share of the learning takes at most two thirds of the members' time.

    The last third is for the sum of w's gradients.
    """
    return max(1, math.ceil(1.5 * learn / members - 1e-9))


def step_time(
    config: Config, times: Assumed, num_members: int, num_nodes: int, gbit: float, ranks_of_w: int = 1
) -> StepTime:
    ranks = num_members + ranks_of_w
    node_of = [rank * num_nodes // ranks for rank in range(ranks)]
    placement = place(ranks, num_members, True, 1, node_of, ranks_of_w)
    floats = config.batch_size * feature_dims(config, plan_of(config, 1))[0]
    gather = transfer(times, placement, node_of, 2 * BYTES * floats + CHECKSUM, gbit)
    scatter = transfer(times, placement, node_of, BYTES * floats, gbit)
    # On the rank with the most pairs.
    share = math.ceil(compared_pairs(config, num_members) / ranks_of_w) / PAIRS_OF_FOUR
    between = gather + share * times.gradient + scatter
    learn = share * times.learn + sums(config, times, placement, node_of, gbit)
    members, w = times.forward + between + times.backward, between + learn
    return StepTime(gather, scatter, max(members, w), "members" if members >= w else "w")


def transfer(times: Assumed, placement: Placement, node_of: Sequence[int], size: int, gbit: float) -> float:
    """Return the seconds of messages from all members to every rank of w, or back.

    Links of different nodes work in parallel; messages on one link are sent one after another.
    """
    members, w = (Counter(node_of[rank] for rank in ranks) for ranks in (placement.host_of, placement.discriminators))
    inside = max((members[node] for node in w), default=0)
    into = max(w[node] * (placement.num_members - members[node]) for node in w)
    out_of = max(members[node] * (w.total() - w[node]) for node in members)
    near = times.latency_inside + 8e-9 * inside * size / times.gbit_inside if inside else 0.0
    return max(near, times.latency + 8e-9 * max(into, out_of) * size / gbit if into else 0.0)


def sums(config: Config, times: Assumed, placement: Placement, node_of: Sequence[int], gbit: float) -> float:
    """Return the seconds in which the ranks of w sum its gradients in a ring, in all learning steps."""
    ranks = len(placement.discriminators)
    if ranks == 1:
        return 0.0
    apart = len({node_of[rank] for rank in placement.discriminators}) > 1
    latency, speed = (times.latency, gbit) if apart else (times.latency_inside, times.gbit_inside)
    size = BYTES * weights_of_w(config, placement.num_members)
    once = 2 * (ranks - 1) * (latency + 8e-9 * size / ranks / speed)
    return config.redundancy.num_steps * once


def plan_of(config: Config, num_members: int) -> Plan:
    return Plan.of(config, num_members, config.data.image_shape)


def weights_of_w(config: Config, num_members: int) -> int:
    with torch.device("meta"):
        w = build_counterpart(config, Method(config.method), plan_of(config, num_members), NUM_CLASSES)
    return sum(parameter.numel() for parameter in w.parameters())
