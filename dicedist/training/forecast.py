"""Forecast the time of a run on a CPU: a step and the reading of images, timed on copies, on all ranks at once.

Ranks that share cores slow each other down here as in training, so the slowest rank's time needs no correction.

Legend: M members, B inputs, D features.
"""

import math
import time
from statistics import fmean

import torch
from torch import nn

from dicedist.algorithm.build import build_hosted, read_shape
from dicedist.algorithm.schedules import Schedules
from dicedist.algorithm.targets import Targets
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.evaluation.redundancy import DRAWS
from dicedist.training.job import Job

ROUNDS = 5  # at most; the first one only sets up the kernels
FASTER = 0.9  # w is divided if a step takes less than this share of the time: the ranks must also sum its gradients
READ = 128  # images per batch of reading
ENOUGH = 2.0  # seconds after which two rounds are enough


def seconds_to_go(job: Job, world: World, exchange: Exchange, teacher: nn.Module | None, steps_left: int) -> float:
    """Return the seconds of all steps, the validations and the final evaluation. All ranks call this."""
    rehearsal, config, source = Rehearsal(job, world, exchange, teacher), job.config, job.source
    per_step, per_image = rehearsal.seconds()
    steps_per_epoch = job.extent.steps_per_epoch
    validations = math.ceil(steps_left / (steps_per_epoch * config.evaluate.every_epochs))  # the last step has one too
    held_out = len(source.val) or len(source.test)
    watched = min(config.evaluate.train_images, len(source.train)) if len(source.val) else 0
    images = validations * (len(source.val) + watched) + len(source.test) + (held_out if job.method.estimator else 0)
    # The estimate of redundancy compares pairs as one learning step does, without its backward pass.
    reads_w = job.method.estimator is not None and rehearsal.w is not None
    estimates = DRAWS * held_out / config.batch_size / config.redundancy.num_steps / 2 if reads_w else 0
    # The last batch of an epoch is smaller; for few images, much smaller.
    whole_steps = steps_left * len(source.train) / (steps_per_epoch * config.batch_size)
    mine = per_step * (whole_steps + estimates) + per_image * images
    return world.control.maximum(round(1000 * mine)) / 1000


def pairs_that_hide(job: Job, world: World, exchange: Exchange, teacher: nn.Module | None) -> int:
    """Return how many pairs of members w, on its own ranks, can compare while the members compute. All ranks call this.

    On a rank with members nothing hides the work of w, so w compares all pairs.
    """
    rehearsal = Rehearsal(job, world, exchange, teacher)
    members, w = rehearsal.seconds_of_parts()
    ranks = rehearsal.w.division.ranks if rehearsal.w else 1
    own = (round(1e6 * members), round(1e6 * w), ranks, int(rehearsal.w is not None and rehearsal.num_hosted > 0))
    slowest, longest, ranks, shared = (world.control.maximum(value) for value in own)
    pairs = math.comb(len(exchange.compared), 2)
    return pairs if shared else max(ranks, min(pairs, pairs * slowest // max(1, longest)))


def dividing(job: Job, world: World, exchange: Exchange, teacher: nn.Module | None) -> tuple[bool, str]:
    """Return whether dividing w among all ranks is faster, and a sentence with the reason. All ranks call this."""
    rehearsal = Rehearsal(job, world, exchange, teacher)
    own = [*rehearsal.seconds_of_parts(), float(rehearsal.w is not None and rehearsal.num_hosted > 0)]
    members, w, on_member_rank = (world.control.maximum(round(1e6 * value)) / 1e6 for value in own)
    is_faster = divides(members, w, world.size, bool(on_member_rank))
    how = f"all {world.size} ranks divide it" if is_faster else "one rank holds it"
    return is_faster, f"w takes {1000 * w:.1f} ms of a step, the members of a rank {1000 * members:.1f} ms: {how}"


def divides(members: float, w: float, ranks: int, on_member_rank: bool) -> bool:
    """Compare the seconds of a step with w on one rank, with members or alone, and with a share of w on every rank."""
    return members + w / ranks < FASTER * (members + w if on_member_rank else max(members, w))


class Rehearsal:
    """Times copies of the run's parts: one member stands for all members of this rank, and a new w for w."""

    def __init__(self, job: Job, world: World, exchange: Exchange, teacher: nn.Module | None):
        config, mine = job.config, exchange.placement.members_on(exchange.rank)
        hosts_w = exchange.rank in exchange.placement.discriminators
        copies = build_hosted(config, job.method, job.plan, mine[:1], hosts_w, job.extent.num_classes, exchange.device)
        self.world, self.num_hosted, self.teacher = world, len(mine), teacher
        self.inputs = zeros(-(-config.batch_size // exchange.replicas), job).to(world.device)
        self.read_at_once = zeros(READ, job).to(world.device)
        self.targets = Targets((torch.arange(config.batch_size) % job.extent.num_classes).to(world.device))
        self.members = [part.module for part in copies.members.values()]
        self.trunk = copies.trunk.module if copies.trunk else nn.Identity()
        self.w, self.optimizer = copies.w, copies.discriminator.optimizer if copies.discriminator else None
        if self.w is not None:
            self.w.division = exchange.division
        self.now = Schedules(config).at(config.epochs)
        compared, widths = exchange.compared, exchange.widths
        self.read = {
            name: torch.ones(
                len(compared),
                config.batch_size,
                max(widths[name][member] for member in compared),
                device=world.device,
            )
            for name in (exchange.features if self.w else ())
        }

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of one step, and of reading one image with all members of this rank."""
        members, w = self.seconds_of_parts()
        return members + w, self.seconds_of_reading() * max(1, self.num_hosted)

    def seconds_of_parts(self) -> tuple[float, float]:
        """Return the seconds per step of this rank's members (forward, backward, teacher), and of w.

        They are means over some rounds: on a busy machine the slowest rank of a single round is arbitrary.
        """
        device, hosted = self.world.device, max(1, self.num_hosted)
        of_members: list[float] = []
        of_counterpart: list[float] = []
        for count in range(1, ROUNDS + 1):
            self.world.control.barrier()
            started = now_done(device)
            for member in self.members:
                member(self.trunk(self.inputs)).sum().backward()
            members_done = now_done(device)
            if self.teacher is not None:
                self.teacher(self.inputs)
            teacher_done = now_done(device)
            self.learn()
            of_members.append((members_done - started) * hosted + teacher_done - members_done)
            of_counterpart.append(now_done(device) - teacher_done)
            spent = self.world.control.maximum(round(1000 * (sum(of_members) + sum(of_counterpart)))) / 1000
            if count > 1 and spent > ENOUGH:  # the same on all ranks
                break
        return fmean(of_members[1:]), fmean(of_counterpart[1:])

    def learn(self) -> None:
        if self.w is None or self.optimizer is None:
            return
        self.w.answers(self.read, self.targets, self.now, (0, 0))
        self.w.study(self.optimizer, self.read, self.targets, self.now, (0, 0))

    @torch.inference_mode()
    def seconds_of_reading(self) -> float:
        for module in (*self.members, self.trunk):
            module.eval()
        self.world.control.barrier()
        started = time.monotonic()
        for member in self.members:
            member(self.trunk(self.read_at_once))
        return (time.monotonic() - started) / len(self.read_at_once)


def now_done(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def zeros(number: int, job: Job) -> torch.Tensor:
    inputs = torch.zeros(number, *read_shape(job.config, job.plan))
    return inputs if inputs.dim() == 2 else inputs.to(memory_format=torch.channels_last)
