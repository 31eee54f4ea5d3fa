"""Validation during training: measure the held-out inputs, and some of the training set."""

import contextlib
import functools

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.algorithm.parts import Hosted
from dicedist.cluster import signals
from dicedist.cluster.world import World
from dicedist.data import sources
from dicedist.data.sources import Split, some_of_each
from dicedist.evaluation.evaluator import BATCH
from dicedist.evaluation.readings import Readings, read
from dicedist.evaluation.redundancy import held_out_redundancy, rows_for_w
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.job import Job


class Validation:
    """Every rank has one, and reads the members that it leads."""

    def __init__(self, job: Job, world: World, hosted: Hosted, leading: Hosted, tracker: SilentTracker):
        """leading: the members that this rank evaluates, one of their replicas each."""
        self.job, self.world, self.hosted, self.leading, self.tracker = job, world, hosted, leading, tracker

    def due(self, done: int, validated: int) -> bool:
        epochs, rest = divmod(done, self.job.extent.steps_per_epoch)
        at_the_end = done >= self.job.extent.total_steps
        due = at_the_end or (rest == 0 and epochs % self.job.config.evaluate.every_epochs == 0)
        return validated < done and due and len(self.job.source.val) > 0

    def __call__(self, done: int) -> tuple[bool, Tensor | None]:
        """All ranks call. Tell if they were stopped meanwhile; on rank 0, return all members' held-out logits."""
        source = self.job.source
        splits = {name: split for name, split in (("val", source.val), ("train_set", self.watched)) if len(split)}
        readings = self.read(splits)
        if self.world.control.agree(len(readings) < len(splits)):
            return True, None
        logits = {name: self.collect(readings[name], split) for name, split in splits.items()}
        nats = held_out_redundancy(
            self.job.config, self.job.method, self.job.plan, self.job.placement, self.world.control, self.hosted,
            readings["val"], source,
        )  # fmt: skip
        named = {} if nats is None else {"val/redundancy_nats": nats}
        for name, found_MNK in logits.items():
            if found_MNK is not None:
                measures = metrics.validation_measures if name == "val" else metrics.training_measures
                measured = measures(found_MNK, splits[name].labels_N)
                named |= {f"{name}/{measure}": value for measure, value in measured.items()}
        if self.world.reports:
            self.tracker.log(done, self.job.epoch(done), named)
        return False, logits["val"]

    def read(self, splits: dict[str, Split]) -> dict[str, dict[int, Readings]]:
        """Read the splits with the members of this rank; fewer than all if a signal came."""
        rows = {"val": rows_for_w(self.job.source), "train_set": torch.arange(0)}  # whose features are wanted
        readings: dict[str, dict[int, Readings]] = {}
        with contextlib.suppress(signals.Stopped), signals.interruptible():
            for name, split in splits.items():
                noun = f"{'validation' if name == 'val' else 'training'} {self.job.source.kind}"
                progress = self.tracker.stage(len(split), noun)
                readings[name] = read(
                    self.leading, split, self.job.source, BATCH, self.world.device, progress, rows[name]
                )
                progress.clear()
        return readings

    @functools.cached_property
    def watched(self) -> Split:
        """Training inputs on which diversity is read as well, as many of each class as possible."""
        train = self.job.source.train
        return sources.part(train, some_of_each(train.labels_N, self.job.config.evaluate.train_images))

    def collect(self, readings: dict[int, Readings], split: Split) -> Tensor | None:
        """All ranks call; rank 0 receives the logits of every member."""
        mine = {member: reading.logits_NK for member, reading in readings.items()}
        shapes = [(len(split), self.job.source.num_classes)] * self.job.plan.num_members
        found = self.world.control.collect(mine, shapes, self.job.placement.host_of)
        return None if found is None else torch.stack(found)
