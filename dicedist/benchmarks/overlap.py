"""Whether the discriminator w learns while members compute: real schedule and messages, sleep instead of computation.

A device that computes leaves the host free, and so does a rank that sleeps: no GPU is needed to measure the schedule.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import feature_dims
from dicedist.algorithm.counterpart import Read
from dicedist.algorithm.member import Encoding
from dicedist.algorithm.messages import Fields
from dicedist.algorithm.objectives import View
from dicedist.algorithm.schedules import Moment
from dicedist.algorithm.step import Step, Values
from dicedist.benchmarks.processes import run_ranks
from dicedist.cluster.assembly import assemble
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import place
from dicedist.cluster.world import joined
from dicedist.config import Config

CPU = torch.device("cpu")
WARM_UP = 3


@dataclass(frozen=True)
class Durations:
    """Seconds."""

    forward: float
    gradient: float
    backward: float
    learn: float


class EmulatedStep(Step):
    durations: Durations

    def encode(self, batch: Batch) -> dict[int, Encoding]:
        time.sleep(self.durations.forward * len(self.hosted.members))
        assert isinstance(self.exchange, Exchange)
        size, widths = len(batch.labels_B), self.exchange.widths
        return {member: zeros(size, widths["mean"][member], widths["logits"][member]) for member in self.hosted.members}

    def answers(self, read: Read | None, batch: Batch, now: Moment) -> tuple[Fields | None, Values]:
        if read is None:
            return None, {}
        time.sleep(self.durations.gradient)
        return {"mean": torch.zeros_like(read["mean"])}, {}

    def descend(self, views: Sequence[View], fraction: float, now: Moment) -> Values:
        time.sleep(self.durations.backward * len(views))
        return {}

    def learn(self, read: Read | None, batch: Batch, now: Moment) -> Values:
        if read is not None:
            time.sleep(self.durations.learn)
        return {}


def zeros(batch: int, feature_dim: int, num_classes: int) -> Encoding:
    features_BD = torch.zeros(batch, feature_dim)
    return Encoding(features_BD, features_BD, features_BD, torch.zeros(batch, num_classes))


def seconds_a_step(config: Config, num_members: int, durations: Durations, num_steps: int = 12) -> float:
    """The mean of the slowest rank, with one device per part: M + 1 ranks."""
    return max(run_ranks(num_members + 1, emulate, config, num_members, durations, num_steps))


def emulate(rank: int, config: Config, num_members: int, durations: Durations, num_steps: int) -> float:
    with joined(timeout=60) as world:
        placement = place(world.size, num_members, needs_discriminator=True)
        step, _ = assemble(config, placement, world, num_classes=100, steps_per_epoch=1000, kind=EmulatedStep)
        assert isinstance(step, EmulatedStep)
        step.durations = durations
        labels_B = torch.zeros(config.batch_size, dtype=torch.int64)
        for n in range(WARM_UP + num_steps):
            if n == WARM_UP:
                world.control.barrier()
                started = time.perf_counter()
            step(Batch(0, n, len(labels_B), slice(None), labels_B, labels_B, n, []))
        return (time.perf_counter() - started) / num_steps


def overlap(config: Config) -> list[dict[str, Any]]:
    """Four members; w's learning takes from no time to longer than the members' own work."""
    base = Durations(forward=0.1, gradient=0.02, backward=0.2, learn=0.0)
    members_alone = base.forward + base.gradient + base.backward
    rows = []
    for learn in (0.0, 0.1, 0.2, 0.3, 0.4):
        seconds = seconds_a_step(config, 4, Durations(base.forward, base.gradient, base.backward, learn))
        rows.append(
            {
                "w learns, s": learn,
                "step, s": seconds,
                "forward + gradient + backward, s": members_alone,
                "ratio": seconds / members_alone,
            }
        )
    return rows


def scaling(config: Config) -> list[dict[str, Any]]:
    """One device per part, from 2 to 10 members: the time of a step, and the bytes per member, sent and received."""
    durations = Durations(forward=0.1, gradient=0.02, backward=0.2, learn=0.3)
    rows: list[dict[str, Any]] = []
    for num_members in range(2, 11, 2):
        seconds = seconds_a_step(config, num_members, durations)
        dims = feature_dims(config, num_members)
        sent = 3 * 4 * config.batch_size * sum(dims) + 8 * num_members
        first = rows[0]["step, s"] if rows else seconds
        rows.append(
            {
                "members": num_members,
                "step, s": seconds,
                "to 2 members": seconds / first,
                "bytes per member": sent // num_members,
            }
        )
    return rows
