"""How long a run will take on a CPU: a step and the reading of images, timed on copies, on all ranks at once.

Ranks that share cores slow each other down here as they will later, so the slowest rank's time is taken as it is.

Legend: M members, B inputs, D features.
"""

import copy
import time

import torch

from dicedist.algorithm.adversary import Features
from dicedist.algorithm.build import feature_dims
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
    images = validations * len(source.val) + len(source.test) + (held_out if step.method.adversarial else 0)
    # The estimate of redundancy compares pairs as one learning step does, without its backward pass.
    estimates = DRAWS * held_out / config.batch_size / config.redundancy.num_steps / 2 if step.hosted.w else 0
    mine = per_step * (steps_left + estimates) + per_image * images
    return world.control.agree(round(1000 * mine)) / 1000


class Rehearsal:
    """One member's copy stands for all that are hosted here, and a copy of w for w: the run itself is not touched."""

    def __init__(self, config: Config, world: World, step: Step, source: Source):
        self.world, self.hosted = world, step.hosted
        size, batch = config.data.size, -(-config.batch_size // step.replicas)
        self.images = torch.zeros(batch, 3, size, size).to(memory_format=torch.channels_last)
        self.labels_B = torch.arange(config.batch_size) % source.num_classes
        uncopied = {id(step.exchange): step.exchange}  # a synchronised batch norm refers to it
        self.members = [copy.deepcopy(part.module, {**uncopied}) for part in [*self.hosted.members.values()][:1]]
        self.trunk = copy.deepcopy(self.hosted.trunk.module, uncopied) if self.hosted.trunk else torch.nn.Identity()
        self.w = copy.deepcopy(self.hosted.w)
        self.optimizer = self.w.build_optimizer() if self.w else None
        self.now = step.schedules.at(config.epochs)
        shape = (len(step.exchange.compared), config.batch_size, max(feature_dims(config, step.num_members)))
        self.features = Features(torch.zeros(shape), torch.ones(shape)) if self.w else None

    def seconds(self) -> tuple[float, float]:
        """For one step, and for reading one image with all members hosted here."""
        hosted = max(1, len(self.hosted.members))
        for _ in range(TIMED):
            self.world.control.barrier()
            started = time.monotonic()
            for member in self.members:
                member(self.trunk(self.images)).sum().backward()
            members = (time.monotonic() - started) * hosted
            started = time.monotonic()
            self.learn()
            step = members + time.monotonic() - started
        return step, self.seconds_of_reading() * hosted

    def learn(self) -> None:
        if self.w is None or self.optimizer is None or self.features is None:
            return
        self.w.redundancy_gradients(self.features, self.labels_B, self.now, (0, 0))
        self.w.learn(self.optimizer, self.features, self.labels_B, self.now, (0, 0))

    @torch.inference_mode()
    def seconds_of_reading(self) -> float:
        images = self.images[:1].expand(min(BATCH, 128), -1, -1, -1).contiguous(memory_format=torch.channels_last)
        for module in (*self.members, self.trunk):
            module.eval()
        self.world.control.barrier()
        started = time.monotonic()
        for member in self.members:
            member(self.trunk(images))
        return (time.monotonic() - started) / len(images)
