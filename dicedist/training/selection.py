"""Model selection by validation: the best checkpoint so far, and early stopping.

Both depend only on the records, so a resumed run decides as an uninterrupted run does.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dicedist.cluster.control import Control
from dicedist.config import Config, names
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.listeners import Listener
from dicedist.training.recorder import Recorder

HIGHER_IS_BETTER = {"val/nll": False, "val/accuracy": True}
Validations = Sequence[tuple[int, float]]  # (step, value), in order


def best_of(validations: Validations, metric: str) -> tuple[int, float] | None:
    """Return the best validation, the first in a tie; None without validations."""
    sign = -1 if HIGHER_IS_BETTER[metric] else 1
    return min(validations, key=lambda validation: sign * validation[1], default=None)


def is_over(validations: Validations, metric: str, patience: int | None) -> bool:
    """Return whether `patience` validations have passed since the best one."""
    best = best_of(validations, metric)
    return patience is not None and best is not None and sum(step > best[0] for step, _ in validations) >= patience


class Selection(Listener):
    """Selects checkpoints after a validation. It is the last listener, when all parts are final. Rank 0 decides."""

    def __init__(self, config: Config, control: Control, tracker: SilentTracker, recorder: Recorder):
        self.best_by, self.stopping = config.checkpoint.best, config.early_stopping
        self.control, self.tracker, self.recorder = control, tracker, recorder
        self.over = self.is_over()  # the same on all ranks
        recorder.best = self.best()

    def validations(self, metric: str) -> Validations:
        """Return the ensemble's values so far on rank 0, and none on other ranks."""
        return self.tracker.history(names.validation(names.ENSEMBLE, metric.rpartition("/")[2]))

    def best(self) -> dict[str, Any] | None:
        """Describe the best validation so far on rank 0, for the manifest of a checkpoint."""
        found = best_of(self.validations(self.best_by), self.best_by) if self.best_by else None
        return None if found is None else {"step": found[0], "value": found[1], "metric": self.best_by}

    def is_over(self) -> bool:
        patience, metric = self.stopping.patience, self.stopping.metric
        return patience is not None and bool(self.control.maximum(is_over(self.validations(metric), metric, patience)))

    def after_epoch(self, done: int, logits_MNK: Tensor | None) -> None:
        self.over = self.is_over()
        if self.best_by is not None:
            self.recorder.best = self.best()
            if self.control.maximum(self.recorder.best is not None and self.recorder.best["step"] == done):
                self.recorder.save_soon(done)
        if self.over:
            metric, patience = self.stopping.metric, self.stopping.patience
            self.tracker.say(f"{metric} has not improved in {patience} validations: training ends at step {done:,}")
