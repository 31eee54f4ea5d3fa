"""The overlap of w's learning with the members' work: real schedule and messages, sleep instead of computation.

A device that computes leaves the host free, and so does a rank that sleeps. So the schedule is measured without a GPU.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.counterpart import Read
from dicedist.algorithm.encoders import Encoders
from dicedist.algorithm.member import Encoding
from dicedist.algorithm.messages import Answers, Values
from dicedist.algorithm.objectives import View
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.step import Step
from dicedist.algorithm.targets import Targets
from dicedist.benchmarks.building import build_step, plan_of
from dicedist.benchmarks.processes import run_ranks
from dicedist.benchmarks.simulation import PAIRS_OF_FOUR, compared_pairs, ranks_that_hide
from dicedist.cluster.world import World, joined
from dicedist.config import Config
from dicedist.console.lines import say

WARM_UP = 1
NUM_STEPS = 4  # of w's learning
TOO_LONG = 10.0  # seconds: if w learns longer than this on one rank, only its division is measured


class Durations(NamedTuple):
    """Seconds."""

    forward: float
    gradient: float
    backward: float
    learn: float


class EmulatedEncoders(Encoders):
    durations: Durations

    def encode(self, batch: Batch) -> dict[int, Encoding]:
        time.sleep(self.durations.forward * len(self.hosted.members))
        widths, encodings = self.exchange.widths, {}
        for member in self.hosted.members:
            features_BD, logits_BK = (torch.zeros(batch.size, widths[name][member]) for name in ("mean", "logits"))
            encodings[member] = Encoding(features_BD, features_BD, features_BD, logits_BK)
        return encodings


class EmulatedStep(Step):
    durations: Durations

    def answer(
        self, read: Read | None, targets: Targets, now: ScheduleValues, where: tuple[int, int]
    ) -> tuple[Answers | None, Values]:
        if read is None:
            return None, {}
        time.sleep(self.durations.gradient)
        return Answers({"mean": torch.zeros_like(read["mean"])}), {}

    def descend(self, views: Sequence[View], fraction: float, now: ScheduleValues) -> Values:
        time.sleep(self.durations.backward * len(views))
        return {}

    def learn(self, read: Read | None, targets: Targets, now: ScheduleValues, where: tuple[int, int]) -> Values:
        if read is not None and self.hosted.w is not None:
            for _ in range(NUM_STEPS):
                time.sleep(self.durations.learn / NUM_STEPS)
                self.hosted.w.division.sum_gradients([*self.hosted.w.parameters()])
        return {}


def emulated(config: Config, world: World, durations: Durations) -> EmulatedStep:
    real, _ = build_step(config, world)
    encoders = EmulatedEncoders(config, real.method, plan_of(config), real.hosted, real.exchange)
    step = EmulatedStep(real.method, real.hosted, real.exchange, encoders, real.schedules, real.loss)
    encoders.durations = step.durations = durations
    return step


def seconds_a_step(config: Config, num_members: int, durations: Durations, num_steps: int, ranks_of_w: int) -> float:
    """Return the mean of the slowest rank, with one device per part: M + 1 ranks, or more if w is divided."""
    ensemble, redundancy = replace(config.ensemble, size=num_members), replace(config.redundancy, ranks=ranks_of_w)
    config = replace(config, ensemble=ensemble, redundancy=redundancy)
    return max(run_ranks(num_members + ranks_of_w, emulate, config, durations, num_steps))


def emulate(rank: int, config: Config, durations: Durations, num_steps: int) -> float:
    torch.set_num_threads(1)  # a rank only waits and sends
    with joined(timeout=300) as world:  # many ranks on one machine need long to join
        step = emulated(config, world, durations)
        labels_B = torch.zeros(config.batch_size, dtype=torch.int64)
        for n in range(WARM_UP + num_steps):
            if n == WARM_UP:
                world.control.barrier()
                started = time.perf_counter()
            step(Batch(0, n, len(labels_B), slice(None), labels_B, labels_B, n, []))
        seconds = (time.perf_counter() - started) / num_steps
        world.control.barrier()  # rank 0 serves the store: it must leave last
        return seconds


def overlap(config: Config) -> list[dict[str, Any]]:
    """Time steps of four members; w's learning takes from no time to longer than the members' own work."""
    forward, gradient, backward = 0.1, 0.02, 0.2
    alone, rows = forward + gradient + backward, []
    for learn in (0.0, 0.1, 0.2, 0.3, 0.4):
        seconds = seconds_a_step(config, 4, Durations(forward, gradient, backward, learn), num_steps=12, ranks_of_w=1)
        times = {"w learns, s": learn, "step, s": seconds, "forward + gradient + backward, s": alone}
        rows.append({**times, "ratio": seconds / alone})
    return rows


def scaling(config: Config) -> list[dict[str, Any]]:
    """Time steps from 4 to 32 members, with one device per part and work of w for each pair of members.

    w is on one rank, and on as few ranks as hide its learning. The cores of this machine carry the messages of all
    devices; the last column shows their cost: the time of a step without computation.
    """
    forward, backward, gradient, learn = 0.4, 0.8, 0.04, 0.4  # seconds; gradient and learn: of w for four members
    rows: list[dict[str, Any]] = []
    for num_members in (4, 8, 16, 32):
        share = compared_pairs(config, num_members) / PAIRS_OF_FOUR
        hidden = ranks_that_hide(share * learn, forward + backward)
        for ranks_of_w in sorted({1, hidden} if share * learn < TOO_LONG else {hidden}):
            say(f"{num_members} members and w on {ranks_of_w} rank{'s' * (ranks_of_w > 1)} ...")
            own = share / ranks_of_w
            seconds, messages = (
                seconds_a_step(config, num_members, durations, 3, ranks_of_w)
                for durations in (Durations(forward, own * gradient, backward, own * learn), Durations(0, 0, 0, 0))
            )
            first = rows[0]["step, s"] if rows else seconds
            sizes = {"members": num_members, "ranks of w": ranks_of_w, "step, s": seconds}
            rows.append({**sizes, "to 4 members": seconds / first, "messages alone, s": messages})
    return rows
