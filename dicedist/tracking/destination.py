"""The interface between the mirror and a tracker. Each tracker implements it in its own file."""

import abc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dicedist.config import Config
from dicedist.config.schema import TRACKERS
from dicedist.reporting.svg import Figure
from dicedist.runs.run import Run
from dicedist.tracking.mirroring import command_for
from dicedist.tracking.state import State


class Destination(abc.ABC):
    """A run in one tracker. Methods raise the errors of the tracker's library; the mirror decides about retries."""

    name: ClassVar[str]  # in tracking=NAME
    variables: ClassVar[Mapping[str, str]] = {}  # defaults of environment variables of the tracker's library

    def __init__(self, run: Run, config: Config):
        for variable, value in self.variables.items():
            os.environ.setdefault(variable, value)
        self.run, self.config, self.state = run, config, State(run.mirror_file(self.name))

    @property
    def title(self) -> str:
        return TRACKERS[self.name]

    @property
    @abc.abstractmethod
    def shown(self) -> str:
        """The address of the tracker, for messages."""

    @property
    def remedy(self) -> str:
        """The command that sends the rest of the run."""
        return command_for(self.run, self.name)

    @abc.abstractmethod
    def begin(self) -> bool:
        """Open the run in the tracker. Return True if the tracker has no records of the run yet."""

    @abc.abstractmethod
    def send_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send consecutive records of the run."""

    @abc.abstractmethod
    def send_result(self, values: Mapping[str, float]) -> None:
        """Send every number of the evaluation, by name."""

    @abc.abstractmethod
    def close(self, status: str) -> None:
        """End the run in the tracker. status: FINISHED, KILLED or FAILED."""

    def known(self, records: Sequence[Mapping[str, Any]]) -> set[tuple[str, int]]:
        """Return the (name, step) pairs that the tracker has already received from these records."""
        return set()

    def start_over(self) -> bool:
        """Discard all records in the tracker, if the tracker can. Return whether all must be sent again."""
        return False

    def send_files(self, figures: Mapping[str, Figure], files: Sequence[Path]) -> None:  # noqa: B027  optional
        """Send the figures of the report, and the files of the run."""

    def send_model(self) -> None:  # noqa: B027  optional
        """Send the ensemble of the last checkpoint."""

    def is_silent(self, error: Exception) -> bool:
        """Return whether the tracker did not answer. Any other error is a refusal."""
        return isinstance(error, OSError)


def numbers_in(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record, without its step and its time."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }
