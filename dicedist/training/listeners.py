"""Listeners of the training loop: hooks around steps and epochs."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dicedist.algorithm.objectives import WeighingTerm
from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.step import Outcome
from dicedist.algorithm.trajectories import TrainingSet, Trajectories
from dicedist.cluster.control import Control
from dicedist.cluster.heartbeat import advance
from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.sources import Split
from dicedist.runs.saver import Saver
from dicedist.training.job import Job


class Listener:
    """Hooks that the trainer calls on every rank, in the order of its listeners. By default they do nothing."""

    def before_step(self, done: int) -> None:
        """done: the number of completed steps."""

    def after_step(self, done: int, outcome: Outcome) -> None:
        """done: the number of completed steps, including this one."""

    def after_epoch(self, done: int, logits_MNK: Tensor | None) -> None:
        """Called after a validation. logits_MNK: all members' logits of the held-out inputs, on rank 0."""

    def finish(self, stopped: bool) -> None:
        """Called after the loop, before its last checkpoint. stopped: on request, before the last step."""


class FollowingTrajectories(Listener):
    """Keeps samples of the members' weights during training, and draws the others after the last step."""

    def __init__(self, job: Job, paths: Trajectories, loader: Loader, saver: Saver, device: torch.device):
        self.job, self.paths, self.loader, self.saver, self.device = job, paths, loader, saver, device

    def before_step(self, done: int) -> None:
        self.paths.before_step(done)

    def after_step(self, done: int, outcome: Outcome) -> None:
        self.paths.after_step(done)

    def finish(self, stopped: bool) -> None:
        if stopped:
            return
        held, source = len(self.paths.samples), self.job.source
        of_train, of_val = (partial(self.plain, split) for split in (source.train, source.val))
        self.paths.finish(TrainingSet(self.augmented, of_train, of_val))
        if len(self.paths.samples) > held:
            self.saver.forget()  # an earlier checkpoint of this step may lack the samples

    def augmented(self) -> Iterator[Tensor]:
        for batch in self.loader.epoch(self.job.config.epochs):
            advance()
            yield batch.images[0]

    def plain(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        batch_size = self.job.config.batch_size
        for images_BCHW, labels_B in evaluation_batches(split, self.job.source, batch_size, self.device):
            advance()
            yield images_BCHW, labels_B


class WeighingMembers(Listener):
    """Sends every rank the weights that a term derives from the held-out predictions on rank 0."""

    def __init__(self, term: WeighingTerm, hosted: Hosted, labels_N: Tensor, control: Control):
        self.term, self.hosted, self.labels_N, self.control = term, hosted, labels_N, control

    def after_epoch(self, done: int, logits_MNK: Tensor | None) -> None:
        found = None if logits_MNK is None else self.term.weigh(logits_MNK, self.labels_N)
        weights = self.control.broadcast({"weights": found})["weights"]
        if weights is not None and self.hosted.shared_modules is not None:
            self.term.take_weights(weights, self.hosted.shared_modules)
