"""Records and progress of a run, on rank 0. Every other rank holds a SilentTracker."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dicedist.cluster.heartbeat import advance
from dicedist.config import names
from dicedist.config.schema import TRACKERS, Config
from dicedist.console import lines
from dicedist.console.progress import SILENT, Progress, SilentProgress
from dicedist.runs.files import open_own
from dicedist.runs.run import Run
from dicedist.tracking.mirroring import start_mirror

MIRROR_LIMIT = 600.0  # seconds that a finished training waits for its trackers at most
SHOWN = {  # name of a record -> its name in the progress line
    names.train(names.MEMBERS, names.LOSS): "loss",
    names.train(names.REDUNDANCY): "redundancy",
    names.train(names.DISCRIMINATOR, names.ACCURACY): "w acc",
    names.validation(names.ENSEMBLE, names.ACCURACY): "val ens",
    names.validation(names.MEMBERS, names.ACCURACY): "val members",
}


class SilentTracker:
    """Tracker that accepts every call and does nothing."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}  # by the names of SHOWN

    def open(self) -> None:
        """Start the mirrors, before training begins or resumes."""

    def begin(self) -> None:
        """Start the clock, before the first step."""

    def state(self) -> dict[str, Any]:
        """Return the state of the records for a checkpoint."""
        return {}

    def records(self) -> bytes:
        """Return the text of all records written so far."""
        return b""

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of all records of this name so far."""
        return []

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add the values of some steps to the next summary."""

    def summarize(self, step: int, epoch: float, schedules: Mapping[str, float], quiet: bool = False) -> None:
        """Record the means over the steps since the last summary, and the current values of the schedules.

        quiet: print no line, because a validation of the same step follows.
        """

    def log(self, step: int, epoch: float, metrics: Mapping[str, float], quiet: bool = False) -> None:
        """Write one record."""

    def log_system(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the load and pace of the machine to system.jsonl."""

    def stage(self, total: int, noun: str) -> SilentProgress:
        """Return the progress of another long task."""
        return SILENT

    def show(self, step: int, epoch: float) -> None:
        """Show the progress of training."""

    def say(self, text: str) -> None:
        """Print a line."""

    def warn(self, text: str) -> None:
        """Print a warning."""

    def close(self, finished: bool) -> list[str]:
        """End the mirrors; a finished training waits for them. Return the trackers that lack records."""
        return []


class Tracker(SilentTracker):
    """Tracker of rank 0. state: the records' state in the checkpoint from which training resumes.

    Lines written after that checkpoint are removed, because their steps run again. If the checkpoint fell between two
    summaries, the values before it still count in the means of the next summary.
    """

    def __init__(self, run: Run, total_steps: int, first_step: int, state: Mapping[str, Any] | None, config: Config):
        super().__init__()
        state = state or {"lines": 0, "unwritten": [], "pending": {}}
        self.run, self.config = run, config
        self.pending: dict[str, list[float]] = state["pending"]
        self.lines, self.unwritten = int(state["lines"]), [*state["unwritten"]]
        self.text = bytearray(first_lines(run.records_file, self.lines))
        self.total_steps, self.progress = total_steps, Progress(total_steps, "step", first_step)
        self.mirrors: dict[str, subprocess.Popen[str]] = {}  # by tracker, so that a slow one delays no other

    def open(self) -> None:
        trackers = self.config.tracking.trackers
        self.mirrors = {tracker: start_mirror(self.run, self.config, tracker) for tracker in trackers}
        if self.config.tracking.to == "auto" and not trackers:
            self.say("records stay in the run's folder: MLflow is not installed (pip install 'dicedist[mlflow]')")

    def begin(self) -> None:
        self.progress.begin()

    def records(self) -> bytes:
        return bytes(self.text)

    def state(self) -> dict[str, Any]:
        return {"lines": self.lines, "unwritten": [*self.unwritten], "pending": {**self.pending}}

    def history(self, name: str) -> list[tuple[int, float]]:
        lines = (*self.text.decode().splitlines(), *self.unwritten)
        records = (json.loads(line) for line in lines if f'"{name}"' in line)
        return [(record["step"], record[name]) for record in records]

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        for name, column in values.items():
            self.pending[name] = [*self.pending.get(name, []), *column]

    def summarize(self, step: int, epoch: float, schedules: Mapping[str, float], quiet: bool = False) -> None:
        if not self.pending:
            return
        # Sorted, because only some steps have all values: a resumed run must write the same line.
        means = {name: math.fsum(column) / len(column) for name, column in sorted(self.pending.items())}
        means |= mean_of_members(means)
        trained = {names.train(name): value for name, value in means.items()}
        scheduled = {names.schedule(name): value for name, value in schedules.items()}
        self.log(step, epoch, {**trained, **scheduled}, quiet)
        self.pending = {}

    def log(self, step: int, epoch: float, metrics: Mapping[str, float], quiet: bool = False) -> None:
        self.unwritten.append(json.dumps({"step": step, "epoch": round(epoch, 4), **metrics}) + "\n")
        self.write()
        self.latest |= {name: metrics[key] for key, name in SHOWN.items() if key in metrics}
        if not quiet or self.progress.terminal:
            last = step >= self.total_steps or any(names.is_of(name, names.VALIDATION) for name in metrics)
            self.show(step, epoch, always=last or self.progress.terminal)

    def show(self, step: int, epoch: float, always: bool = False) -> None:
        figures = "  ".join(f"{name} {value:.3f}" for name, value in self.latest.items())
        self.progress.show(step, f"epoch {epoch:.2f}  {figures}", always)

    def write(self) -> None:
        """Write the pending records. On a full disk they stay in memory. A removed file is written again."""
        text = "".join(self.unwritten).encode()
        try:
            with open_own(self.run.records_file, "r+b" if self.run.records_file.exists() else "w+b") as file:
                if file.seek(0, os.SEEK_END) < len(self.text):
                    self.warn(f"{self.run.records_file} was removed or shortened: it is written again")
                    file.seek(0)
                    file.write(self.text)
                file.truncate(len(self.text))  # the rest is half a line, or of steps that run again
                file.seek(len(self.text))
                file.write(text)
        except OSError as error:
            if len(self.unwritten) == 1:
                self.warn(f"{self.run.records_file} cannot be written, records are kept in memory: {error}")
            return
        self.text += text
        self.lines, self.unwritten = self.lines + len(self.unwritten), []

    def log_system(self, step: int, figures: Mapping[str, float]) -> None:
        with contextlib.suppress(OSError), open_own(self.run.system_file, "a") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **figures}) + "\n")

    def stage(self, total: int, noun: str) -> SilentProgress:
        self.progress.clear()
        return Progress(total, noun)

    def say(self, text: str) -> None:
        self.progress.clear()
        lines.say(text)

    def warn(self, text: str) -> None:
        self.progress.clear()
        lines.warn(text)

    def close(self, finished: bool) -> list[str]:
        self.progress.clear()
        for mirror in self.mirrors.values():
            assert mirror.stdin is not None
            with contextlib.suppress(OSError):  # the mirror may have ended
                mirror.stdin.close()
        if not finished or not self.mirrors:
            return []
        self.say(f"\nsending the results to {', '.join(TRACKERS[tracker] for tracker in self.mirrors)} ...")
        deadline = time.monotonic() + MIRROR_LIMIT
        return [tracker for tracker, mirror in self.mirrors.items() if not received(mirror, deadline)]


def received(mirror: "subprocess.Popen[str]", deadline: float) -> bool:
    """Wait for a mirror until the deadline. Return whether its tracker has received everything."""
    while mirror.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            mirror.wait(1)
        advance()
    if mirror.poll() is None:
        mirror.kill()
    return mirror.returncode == 0


def mean_of_members(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means over members of their losses and gradient norms."""
    averaged = {}
    for name in (names.LOSS, names.GRADIENT_NORM):
        own = (names.record(names.member(index), name) for index in itertools.count())
        values = [means[key] for key in itertools.takewhile(means.__contains__, own)]
        if values:
            averaged[names.record(names.MEMBERS, name)] = math.fsum(values) / len(values)
    return averaged


def first_lines(path: Path, lines: int) -> bytes:
    """Return the first lines of a file, and create the file if needed."""
    with open_own(path, "a+b") as file:
        file.seek(0)
        return b"".join(itertools.islice(file, lines))
