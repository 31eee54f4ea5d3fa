"""How long a run will take on a CPU: a step and the reading of images, timed on copies, on all ranks at once.

Ranks that share cores slow each other down here as they will later, so the slowest rank's time is taken as it is.

Legend: M members, B inputs, D features.
"""

import copy
import time

import torch

from dicedist.algorithm.step import Step
from dicedist.cluster.world import World
from dicedist.config.schema import Config
from dicedist.data.order import num_batches
from dicedist.data.sources import Source
from dicedist.evaluation.evaluator import BATCH
from dicedist.evaluation.redundancy import DRAWS

TIMED = 2  # rounds, of which the last counts: the first one also sets up the kernels


def seconds_to_go(config: Config, world: World, step: Step, source: Source, steps_left: int) -> float:
    """All ranks call. Counts the steps, validation after epochs, and the final evaluation."""
    per_step, per_image = Rehearsal(config, world, step, source).seconds()
    steps_per_epoch = num_batches(len(source.train), config.batch_size)
    validations = steps_left // (steps_per_epoch * config.evaluate.every_epochs) + 1
    held_out = len(source.val) or len(source.test)
    images = validations * len(source.val) + len(source.test) + (held_out if step.method.estimator else 0)
    # The estimate of redundancy compares pairs as one learning step does, without its backward pass.
    reads_w = step.method.estimator is not None and step.hosted.w is not None
    estimates = DRAWS * held_out / config.batch_size / config.redundancy.num_steps / 2 if reads_w else 0
    # The last batch of an epoch is smaller, in a small set much smaller.
    whole_steps = steps_left * len(source.train) / (steps_per_epoch * config.batch_size)
    mine = per_step * (whole_steps + estimates) + per_image * images
    return world.control.agree(round(1000 * mine)) / 1000


class Rehearsal:
    """One member's copy stands for all that are hosted here, and a copy of w for w: the run itself is not touched."""

    def __init__(self, config: Config, world: World, step: Step, source: Source):
        self.world, self.hosted = world, step.hosted
        self.inputs = zeros(-(-config.batch_size // step.replicas), source)
        self.read_at_once = zeros(min(BATCH, 128), source)
        self.labels_B = torch.arange(config.batch_size) % source.num_classes
        uncopied = {id(step.exchange): step.exchange}  # a synchronised batch norm refers to it
        self.members = [copy.deepcopy(part.module, {**uncopied}) for part in [*self.hosted.members.values()][:1]]
        self.trunk = copy.deepcopy(self.hosted.trunk.module, uncopied) if self.hosted.trunk else torch.nn.Identity()
        self.w = copy.deepcopy(self.hosted.w)
        self.optimizer = self.w.build_optimizer() if self.w else None
        self.teacher = step.teacher
        self.now = step.schedules.at(config.epochs)
        compared, widths = step.exchange.compared, step.exchange.widths
        self.read = {
            name: torch.ones(len(compared), config.batch_size, max(widths[name][member] for member in compared))
            for name in (step.exchange.features if self.w else ())
        }

    def seconds(self) -> tuple[float, float]:
        """For one step, and for reading one image with all members hosted here."""
        hosted = max(1, len(self.hosted.members))
        for _ in range(TIMED):
            self.world.control.barrier()
            started = time.monotonic()
            for member in self.members:
                member(self.trunk(self.inputs)).sum().backward()
            members = (time.monotonic() - started) * hosted
            started = time.monotonic()
            if self.teacher is not None:
                self.teacher(self.inputs)
            members += time.monotonic() - started
            started = time.monotonic()
            self.learn()
            step = members + time.monotonic() - started
        return step, self.seconds_of_reading() * hosted

    def learn(self) -> None:
        if self.w is None or self.optimizer is None:
            return
        self.w.answers(self.read, self.labels_B, self.now, (0, 0))
        self.w.study(self.optimizer, self.read, self.labels_B, self.now, (0, 0))

    @torch.inference_mode()
    def seconds_of_reading(self) -> float:
        for module in (*self.members, self.trunk):
            module.eval()
        self.world.control.barrier()
        started = time.monotonic()
        for member in self.members:
            member(self.trunk(self.read_at_once))
        return (time.monotonic() - started) / len(self.read_at_once)


def zeros(number: int, source: Source) -> torch.Tensor:
    inputs = torch.zeros(number, *source.shape)
    return inputs if inputs.dim() == 2 else inputs.to(memory_format=torch.channels_last)
