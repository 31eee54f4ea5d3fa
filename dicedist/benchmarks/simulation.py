"""The time of a step against members, nodes and links, computed from the times of a device and the bytes of a step.

This is a model, not a measurement. Every part has its own device. The link between a node and the others carries one
message at a time. The times of the discriminator w grow with the pairs of members that it compares. `bench scaling`
measures the same schedule over loopback; `bench step` measures the times of a device, which can be entered here.

    python -m dicedist.bench scaling --simulate simulate.forward=0.012 simulate.gbit=10,100 batch_size=256
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from dicedist.algorithm.build import feature_dims
from dicedist.cluster.placement import Placement, place
from dicedist.config import Config, nearest

BYTES, CHECKSUM = 4, 8
PAIRS_OF_FOUR = 6


@dataclass(frozen=True)
class Assumed:
    """Times are seconds on one device, those of w for four members. The defaults describe no particular device."""

    members: tuple[int, ...] = (2, 4, 8, 16)
    nodes: tuple[int, ...] = (1, 2, 4)
    gbit: tuple[float, ...] = (10.0, 100.0)  # of the link between a node and the others, in each direction
    gbit_inside: float = 200.0  # of the link between a device and the others of its node
    latency: float = 50e-6  # of a message between nodes
    latency_inside: float = 10e-6
    forward: float = 0.010
    backward: float = 0.020
    gradient: float = 0.001
    learn: float = 0.010


@dataclass(frozen=True)
class StepTime:
    gather: float
    scatter: float
    step: float
    waits_for: str  # members | w: who sets the pace


def assumed(words: Sequence[str]) -> Assumed:
    """Parsed from words like simulate.gbit=10,100."""
    known = {field.name: field.default for field in fields(Assumed)}
    chosen: dict[str, Any] = {}
    for word in words:
        name, _, text = word.removeprefix("simulate.").partition("=")
        if name not in known:
            raise ValueError(f"simulate.{name}: there is no such key{nearest(name, list(known))}")
        like = known[name]
        try:
            several = isinstance(like, tuple)
            kind = type(like[0]) if isinstance(like, tuple) else float
            values = [kind(value) for value in text.split(",")]
            if min(values) <= 0 or not (several or len(values) == 1):
                raise ValueError
        except ValueError as error:
            raise ValueError(f"{word}: write {'numbers above 0, as 1,2' if several else 'a number above 0'}") from error
        chosen[name] = tuple(values) if several else values[0]
    return Assumed(**chosen)


def simulate(config: Config, times: Assumed) -> list[dict[str, Any]]:
    rows = []
    for num_members, num_nodes, gbit in product(times.members, times.nodes, times.gbit):
        if num_nodes > num_members + 1 or (num_nodes == 1 and gbit != times.gbit[0]):
            continue
        found = step_time(config, times, num_members, num_nodes, gbit)
        alone = times.forward + times.backward
        rows.append(
            {
                "members": num_members,
                "nodes": num_nodes,
                "Gbit/s between": gbit if num_nodes > 1 else "-",
                "gather, ms": 1e3 * found.gather,
                "scatter, ms": 1e3 * found.scatter,
                "step, ms": 1e3 * found.step,
                "to independent": found.step / alone,
                "waits for": found.waits_for,
            }
        )
    return rows


def step_time(config: Config, times: Assumed, num_members: int, num_nodes: int, gbit: float) -> StepTime:
    ranks = num_members + 1
    placement = place(ranks, num_members, True, 1, [rank * num_nodes // ranks for rank in range(ranks)])
    node_of = [rank * num_nodes // ranks for rank in range(ranks)]
    floats = config.batch_size * feature_dims(config, 1)[0]
    gather = transfer(times, placement, node_of, 2 * BYTES * floats + CHECKSUM, gbit)
    scatter = transfer(times, placement, node_of, BYTES * floats, gbit)
    pairs = num_members * (num_members - 1) // 2
    share = min(pairs, config.redundancy.max_pairs or pairs) / PAIRS_OF_FOUR
    between = gather + share * times.gradient + scatter
    members, w = times.forward + between + times.backward, between + share * times.learn
    return StepTime(gather, scatter, max(members, w), "members" if members >= w else "w")


def transfer(times: Assumed, placement: Placement, node_of: Sequence[int], size: int, gbit: float) -> float:
    """Seconds from all members to w, or back: links of different nodes work at once, messages on one link in turn."""
    assert placement.discriminator is not None
    home = node_of[placement.discriminator]
    by_node = Counter(node_of[rank] for rank in placement.host_of)
    away = sum(by_node.values()) - by_node[home]
    inside = times.latency_inside + 8e-9 * by_node[home] * size / times.gbit_inside if by_node[home] else 0.0
    # w's node receives what all other nodes send, so its link is the slowest.
    return max(inside, times.latency + 8e-9 * away * size / gbit if away else 0.0)
