"""How long a run will take on a CPU: a step and the reading of images, timed on copies, on all ranks at once.

Ranks that share cores slow each other down here as they will later, so the slowest rank's time is taken as it is.

Legend: M members, B inputs, D features.
"""

import copy
import math
import time
from statistics import fmean

import torch

from dicedist.algorithm.step import Step
from dicedist.algorithm.targets import Targets
from dicedist.cluster.world import World
from dicedist.config.schema import Config
from dicedist.data.order import num_batches
from dicedist.data.sources import Source
from dicedist.evaluation.readings import BATCH
from dicedist.evaluation.redundancy import DRAWS

ROUNDS = 5  # at most; the first one only sets up the kernels
ENOUGH = 2.0  # seconds after which two rounds do


def seconds_to_go(config: Config, world: World, step: Step, source: Source, steps_left: int) -> float:
    """All ranks call. Counts the steps, validation after epochs, and the final evaluation."""
    per_step, per_image = Rehearsal(config, world, step, source).seconds()
    steps_per_epoch = num_batches(len(source.train), config.batch_size)
    validations = math.ceil(steps_left / (steps_per_epoch * config.evaluate.every_epochs))  # the last step has one too
    held_out = len(source.val) or len(source.test)
    watched = min(config.evaluate.train_images, len(source.train)) if len(source.val) else 0
    images = validations * (len(source.val) + watched) + len(source.test) + (held_out if step.method.estimator else 0)
    # The estimate of redundancy compares pairs as one learning step does, without its backward pass.
    reads_w = step.method.estimator is not None and step.hosted.w is not None
    estimates = DRAWS * held_out / config.batch_size / config.redundancy.num_steps / 2 if reads_w else 0
    # The last batch of an epoch is smaller, in a small set much smaller.
    whole_steps = steps_left * len(source.train) / (steps_per_epoch * config.batch_size)
    mine = per_step * (whole_steps + estimates) + per_image * images
    return world.control.agree(round(1000 * mine)) / 1000


def pairs_that_hide(config: Config, world: World, step: Step, source: Source) -> int:
    """All ranks call. As many pairs of members as w compares, on ranks of its own, while the members compute; beside
    members nothing hides w, and it compares all."""
    members, w = Rehearsal(config, world, step, source).seconds_of_parts()
    ranks = step.hosted.w.division.ranks if step.hosted.w else 1
    beside = step.hosted.w is not None and bool(step.hosted.members)
    own = (round(1e6 * members), round(1e6 * w), ranks, int(beside))
    slowest, longest, ranks, shared = (world.control.agree(value) for value in own)
    pairs = math.comb(len(step.exchange.compared), 2)
    return pairs if shared else max(ranks, min(pairs, pairs * slowest // longest))


class Rehearsal:
    """One member's copy stands for all that are hosted here, and a copy of w for w: the run itself is not touched."""

    def __init__(self, config: Config, world: World, step: Step, source: Source):
        self.world, self.hosted = world, step.hosted
        self.inputs = zeros(-(-config.batch_size // step.replicas), source).to(world.device)
        self.read_at_once = zeros(min(BATCH, 128), source).to(world.device)
        self.targets = Targets((torch.arange(config.batch_size) % source.num_classes).to(world.device))
        uncopied = {id(step.exchange): step.exchange}  # a synchronised batch norm refers to it
        self.members = [copy.deepcopy(part.module, {**uncopied}) for part in [*self.hosted.members.values()][:1]]
        self.trunk = copy.deepcopy(self.hosted.trunk.module, uncopied) if self.hosted.trunk else torch.nn.Identity()
        w = self.hosted.w
        self.w = copy.deepcopy(w, {id(w.division): w.division}) if w else None  # the group of its ranks stays
        self.optimizer = self.w.build_optimizer() if self.w else None
        self.teacher = step.teacher
        self.now = step.schedules.at(config.epochs)
        compared, widths = step.exchange.compared, step.exchange.widths
        self.read = {
            name: torch.ones(
                len(compared),
                config.batch_size,
                max(widths[name][member] for member in compared),
                device=world.device,
            )
            for name in (step.exchange.features if self.w else ())
        }

    def seconds(self) -> tuple[float, float]:
        """For one step, and for reading one image with all members hosted here."""
        members, w = self.seconds_of_parts()
        return members + w, self.seconds_of_reading() * max(1, len(self.hosted.members))

    def seconds_of_parts(self) -> tuple[float, float]:
        """The times in one step of forward and backward of all members hosted here with their teacher, and of w's work.

        The mean over some rounds: of a single one on a busy machine, the slowest rank's time would be an accident.
        """
        members, w, hosted = [], [], max(1, len(self.hosted.members))
        for count in range(1, ROUNDS + 1):
            self.world.control.barrier()
            started = now_done(self.world.device)
            for member in self.members:
                member(self.trunk(self.inputs)).sum().backward()
            taught = now_done(self.world.device)
            if self.teacher is not None:
                self.teacher(self.inputs)
            between = now_done(self.world.device)
            self.learn()
            members.append((taught - started) * hosted + between - taught)
            w.append(now_done(self.world.device) - between)
            spent = self.world.control.agree(round(1000 * (sum(members) + sum(w)))) / 1000
            if count > 1 and spent > ENOUGH:  # the same on all ranks
                break
        return fmean(members[1:]), fmean(w[1:])

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
    """The time, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def zeros(number: int, source: Source) -> torch.Tensor:
    inputs = torch.zeros(number, *source.shape)
    return inputs if inputs.dim() == 2 else inputs.to(memory_format=torch.channels_last)
