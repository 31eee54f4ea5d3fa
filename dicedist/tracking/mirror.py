"""The mirror, a process that synchronizes a tracker with a run's folder.

follow      send records during training
finish      send the rest: records, results, files, the model, and the final status

The status of the run in the tracker follows from the files of the folder (`Run.ending`).
"""

import contextlib
import errno
import hashlib
import heapq
import json
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from dicedist.config import Config
from dicedist.config.compose import flat
from dicedist.console.lines import warn
from dicedist.data.remote import reason_of
from dicedist.metrics.measures import FRESH_REDUNDANCY
from dicedist.reporting.page import figures, write_own_report
from dicedist.runs.run import Run, whole_lines
from dicedist.tracking.destination import Destination, numbers_in
from dicedist.tracking.state import read_or_nothing

INTERVAL = 2.0  # seconds between two reads of the records
PATIENCE = 60.0  # seconds without an answer before the mirror gives up, after the end of training
LINES_AT_ONCE = 20
UNSTORABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
FINISHED = "FINISHED"
T = TypeVar("T")


def destination_of(tracker: str, run: Run, config: Config) -> Destination:
    """Build the named destination. Only this function imports its module, and with it the tracker's library."""
    if tracker == "tensorboard":
        from dicedist.tracking.tensorboard import TensorBoard

        return TensorBoard(run, config)
    if tracker == "wandb":
        from dicedist.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(run, config)
    from dicedist.tracking.mlflow.destination import MLflow

    return MLflow(run, config)


class Mirror:
    def __init__(self, destination: Destination):
        self.destination, self.state = destination, destination.state
        self.run, self.config = destination.run, destination.config
        self.begun = False
        self.problems: set[str] = set()  # problems that the user was warned of
        self.refused = False
        self.unsure = True  # the tracker may have received more than the state records

    def follow(self) -> None:
        """Send records until training closes its end of the pipe. A crash closes the pipe too."""
        self.attempt(self.begin)
        while not select.select([sys.stdin], [], [], INTERVAL)[0]:
            self.attempt(self.send_records)

    def finish(self) -> bool:
        """Send everything that is left. Return whether the tracker received all of it."""
        silent_since = time.monotonic()
        tasks: list[Callable[[], None]] = [self.begin, self.send_records]
        if self.run.ending() == FINISHED:
            tasks += [self.send_result, self.send_files, *([self.send_model] if self.config.tracking.model else [])]
        for task in [*tasks, self.send_status]:
            while not self.attempt(task):
                if time.monotonic() - silent_since > PATIENCE:
                    return False
                time.sleep(INTERVAL)
            silent_since = time.monotonic()
        return not self.refused

    def attempt(self, task: Callable[[], None]) -> bool:
        """Run a task. Return False if the tracker did not answer, so that the task must be tried again.

        Warn only once of each problem, which may recur every two seconds for days.
        """
        name = task.__name__.replace("_", " ")
        try:
            task()
            return True
        except Exception as caught:
            error = caught
        self.unsure = True  # the records may have arrived nevertheless
        silent = self.destination.is_silent(error)
        if isinstance(error, OSError) and error.errno in UNSTORABLE:
            problem, silent = f"could not {name} (`python -m dicedist.mirror` tries again)", False
        else:
            problem = "does not answer" if silent else f"refuses to {name}"
        if problem not in self.problems:
            place = f"{self.destination.title} at {self.destination.shown}"
            warn(f"{place} {problem}, records wait in {self.run}: {reason_of(error)}")
        self.problems.add(problem)
        self.refused |= not silent
        return not silent

    def begin(self) -> None:
        """Open the run in the tracker, or create it there."""
        if self.destination.begin():
            self.state.keep(received={}, marks={}, sent={})
            self.unsure = False
        self.begun = True

    def send_records(self) -> None:
        if not self.begun:
            self.begin()
        # Read the system records first, so that they are never ahead of the others: W&B refuses decreasing steps.
        lines = {path.name: whole_lines(path) for path in (self.run.system_file, self.run.records_file)}
        # A run that goes back to a checkpoint writes the same lines again, which are skipped. The lines differ if the
        # user changed the interval of records or the training.
        changed = {name for name in lines if self.differs(name, lines[name])}
        if changed:
            again = lines if self.destination.start_over() else changed
            self.state.keep(received={**self.state["received"], **dict.fromkeys(again, 0)})
        files = []
        for name in lines:
            records = [json.loads(line) for line in lines[name][self.state["received"].get(name, 0) :]]
            known = self.destination.known(records) if name in changed or self.unsure else set()
            files.append([(name, without(record, known)) for record in records])
        for some in chunks(list(heapq.merge(*files, key=step_of)), LINES_AT_ONCE):
            self.destination.send_records([record for _, record in some])
            self.note_received(Counter(name for name, _ in some), lines)
        self.unsure = False

    def note_received(self, counts: Mapping[str, int], lines: Mapping[str, Sequence[str]]) -> None:
        """Save how many lines of each file the tracker has received, and a digest of these lines."""
        received = Counter(self.state["received"]) + Counter(counts)
        marks = {name: digest_lines(lines[name][: received[name]]) for name in counts}
        self.state.keep(received=dict(received), marks={**self.state["marks"], **marks})

    def differs(self, name: str, lines: Sequence[str]) -> bool:
        """Return whether the lines in the file differ from the lines that were sent."""
        received, mark = self.state["received"].get(name, 0), self.state["marks"].get(name)
        return mark is not None and len(lines) >= received and digest_lines(lines[:received]) != mark

    def send_result(self) -> None:
        if self.is_sent("result"):
            return
        self.destination.send_result(values_of(self.run))
        self.mark_sent("result")

    def send_files(self) -> None:
        if self.is_sent("files"):
            return
        run, drawn = self.run, {}
        if not run.report_file.is_file() or run.report_file.is_symlink():
            write_own_report(run)
        with contextlib.suppress(ValueError):  # a report of an earlier version is sent without figures
            drawn = figures([run])
        paths = (run.config_file, run.environment_file, run.result_file, run.records_file, run.report_file)
        plain = [path for path in paths if path.is_file() and not path.is_symlink()]  # a link could point anywhere
        self.destination.send_files(drawn, plain)
        self.mark_sent("files")

    def send_model(self) -> None:
        step = self.run.checkpoint().step
        if self.state["sent"].get("model") == step:
            return
        self.destination.send_model()
        self.state.keep(sent={**self.state["sent"], "model": step})

    def send_status(self) -> None:
        self.destination.close(self.run.ending())

    def is_sent(self, task: str) -> bool:
        """Return whether the task was done for the present evaluation."""
        return self.state["sent"].get(task) == digest_of(self.run.result_file)

    def mark_sent(self, task: str) -> None:
        self.state.keep(sent={**self.state["sent"], task: digest_of(self.run.result_file)})


def values_of(run: Run) -> dict[str, float]:
    """Return every number of the evaluation by name, and the redundancy as the mean over pairs."""
    result = read_or_nothing(run.result_file)
    fresh = result.get("redundancy_fresh") or {}
    estimates = {"redundancy": result.get("redundancy")} | {
        f"redundancy_fresh.{kind}": fresh.get(kind) for kind in FRESH_REDUNDANCY
    }
    nats = {f"{name}.nats": fmean(found["nats_P"]) for name, found in estimates.items() if found}
    return numbers_in({f"test/{name.replace('.', '/')}": value for name, value in (flat(result) | nats).items()})


def step_of(line: tuple[str, Mapping[str, Any]]) -> int:
    """Return the step of a (file name, record) pair."""
    return int(line[1]["step"])


def without(record: Mapping[str, Any], known: set[tuple[str, int]]) -> dict[str, Any]:
    """Return the record without the values that the tracker has received."""
    return {name: value for name, value in record.items() if (name, record["step"]) not in known}


def digest_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
