"""Validation during training: measure the held-out inputs, and some of the training set."""

import contextlib
import functools
from statistics import fmean

from torch import Tensor

from dicedist import metrics
from dicedist.cluster import signals
from dicedist.cluster.heartbeat import computing
from dicedist.config import names
from dicedist.data import sources
from dicedist.data.sources import Split, some_of_each
from dicedist.evaluation.readings import KEPT, LOGITS, Readings
from dicedist.evaluation.redundancy import READ_BY_W
from dicedist.training.share import Share


class Validation:
    """Validates the ensemble. Every rank reads the members that it evaluates."""

    def __init__(self, share: Share):
        self.share, self.job, self.world, self.tracker = share, share.job, share.world, share.tracker

    def due(self, done: int, validated: int) -> bool:
        epochs, rest = divmod(done, self.job.extent.steps_per_epoch)
        at_the_end = done >= self.job.extent.total_steps
        due = at_the_end or (rest == 0 and epochs % self.job.config.evaluate.every_epochs == 0)
        return validated < done and due and len(self.job.source.val) > 0

    @computing()
    def __call__(self, done: int) -> tuple[bool, Tensor | None]:
        """Validate. Return whether a stop was requested and, on rank 0, all held-out logits. All ranks call this."""
        job, control = self.job, self.world.control
        splits = {names.VALIDATION: job.source.val, names.TRAINING_IMAGES: self.watched}
        splits = {name: split for name, split in splits.items() if len(split)}
        rows_N = some_of_each(job.source.val.labels_N, READ_BY_W)  # the rows whose features w reads
        held_out_columns = (LOGITS, *KEPT) if job.method.estimator else (LOGITS,)
        columns = {names.VALIDATION: held_out_columns, names.TRAINING_IMAGES: (LOGITS,)}
        evaluator = self.share.evaluator_of_members(done)
        readings: dict[str, list[Readings]] = {}
        with contextlib.suppress(signals.Stopped), signals.interruptible():
            for name, split in splits.items():
                noun = f"{'validation' if name == names.VALIDATION else 'training'} {job.source.kind}"
                readings[name] = list(evaluator.read(split, noun, columns[name], rows_N))
        if control.maximum(len(readings) < len(splits)):
            return True, None
        gathered = {name: evaluator.gather(readings[name], columns[name]) for name in splits}
        if not self.world.reports:
            return False, None
        read = {name: found for name, found in gathered.items() if found is not None}  # only on rank 0
        held_out, named = read[names.VALIDATION], {}
        estimated = evaluator.redundancy(held_out.features, job.source.val.labels_N[rows_N], num_draws=1)
        if estimated:
            named[names.validation(names.REDUNDANCY_NATS)] = fmean(estimated["nats_P"])
        for name, found in read.items():
            measures = metrics.validation_measures if name == names.VALIDATION else metrics.training_measures
            measured = measures(found.logits_MNK, splits[name].labels_N)
            named |= {names.record(name, measure): value for measure, value in measured.items()}
        self.tracker.log(done, job.epoch(done), named)
        return False, held_out.logits_MNK

    @functools.cached_property
    def watched(self) -> Split:
        """Return training inputs, balanced over classes, on which diversity is measured as well."""
        train = self.job.source.train
        return sources.part(train, some_of_each(train.labels_N, self.job.config.evaluate.train_images))
