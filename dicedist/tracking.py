"""What a run leaves behind and shows: metrics.jsonl and progress. Ranks that do not report hold a silent tracker."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from dicedist.world import LAUNCHER

RECORDS = "metrics.jsonl"  # the same for every run of one config and seed, however often it was stopped
SYSTEM = "system.jsonl"  # what depends on the machine: pace, load, memory
ENVIRONMENT = "environment.json"


@dataclass
class TrackingConfig:
    to: str  # mlflow | none
    uri: str | None
    experiment: str
    model: str | None  # uint8 | float: the images that the logged model takes
    register: str | None


class Ledger:
    """Values of the last steps, on the device; the host waits for them at log time only."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.names: list[str] = []
        self.rows: list[Tensor] = []

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        if values:
            self.names = list(values)
            self.steps.append(step)
            self.rows.append(torch.stack([value.float() for value in values.values()]))

    def drain(self) -> tuple[dict[str, list[float]], str | None]:
        """The values of each step since the last call, by name, and what went wrong first, if anything did."""
        rows = torch.stack(self.rows).tolist() if self.rows else []
        fault = self.first_fault(rows)
        columns = dict(zip(self.names, zip(*rows, strict=True), strict=bool(rows)))
        self.steps, self.rows = [], []
        return {name: [*values] for name, values in columns.items() if not name.startswith("out_of_step/")}, fault

    def first_fault(self, rows: list[list[float]]) -> str | None:
        for step, row in zip(self.steps, rows, strict=True):
            for name, value in zip(self.names, row, strict=True):
                part, _, term = name.rpartition("/")
                if part == "out_of_step" and value:
                    return f"{term} is out of step with the discriminator at step {step}: it saw another batch"
                if not math.isfinite(value):
                    return (
                        f"{term} of {part or 'the discriminator'} became {value} at step {step}: "
                        "lower optimizer.lr or redundancy.delta; the last checkpoint is intact"
                    )
        return None


class Tracker:
    """The records of a run, on the reporting rank.

    kept: what a checkpoint remembers of them. Lines written after it go, as those steps are run again, and the values
    of an interval that it cut are still part of that interval's means.
    """

    def __init__(
        self, run: Path, total_steps: int, first_step: int, kept: Mapping[str, Any] | None, config: TrackingConfig
    ):
        kept = kept or {"lines": 0, "unwritten": [], "pending": {}}
        self.path = run / RECORDS
        self.pending: dict[str, list[float]] = kept["pending"]
        self.lines, self.unwritten = int(kept["lines"]), [*kept["unwritten"]]
        self.size = size_of(self.path, self.lines)
        self.progress = Progress(total_steps, first_step)
        self.config = config
        self.mirror: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Training is about to begin or to go on."""
        if self.config.to == "mlflow":
            self.mirror = start_mirror(self.path.parent)

    def kept(self) -> dict[str, Any]:
        return {"lines": self.lines, "unwritten": [*self.unwritten], "pending": {**self.pending}}

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Of some steps, for the next summary."""
        for name, column in values.items():
            self.pending[name] = [*self.pending.get(name, []), *column]

    def summarise(self, step: int, epoch: float) -> None:
        """The means over the steps since the last summary."""
        if not self.pending:
            return
        means = {f"train/{name}": math.fsum(column) / len(column) for name, column in self.pending.items()}
        losses = [value for name, value in means.items() if name.endswith("/loss") and "/member_" in name]
        self.log(step, epoch, {**means, "train/members/loss": math.fsum(losses) / len(losses)})
        self.pending = {}

    def log(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        self.unwritten.append(json.dumps({"step": step, "epoch": round(epoch, 4), **metrics}) + "\n")
        self.write()
        self.progress.show(step, epoch, metrics)

    def write(self) -> None:
        """On a full disk records wait in memory for the next time."""
        text = "".join(self.unwritten).encode()
        try:
            with self.path.open("r+b") as file:
                file.truncate(self.size)  # what follows is of steps that were run again, or half a line
                file.seek(self.size)
                file.write(text)
        except OSError as error:
            if len(self.unwritten) == 1:
                self.warn(f"{self.path} cannot be written, records are kept in memory: {error}")
            return
        self.size, self.lines, self.unwritten = self.size + len(text), self.lines + len(self.unwritten), []

    def log_system(self, step: int, figures: Mapping[str, float]) -> None:
        with contextlib.suppress(OSError), self.path.with_name(SYSTEM).open("a") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **figures}) + "\n")

    def say(self, text: str) -> None:
        self.progress.clear()
        put(sys.stdout, f"{text}\n")

    def warn(self, text: str) -> None:
        self.progress.clear()
        warn(text)

    def close(self, status: str) -> None:
        """Training FINISHED or was KILLED: only the former has the time to wait until MLflow has received it all."""
        self.progress.clear()
        if self.mirror is None or self.mirror.stdin is None:
            return
        with contextlib.suppress(OSError):  # it may have given up
            self.mirror.stdin.write(status)
            self.mirror.stdin.close()
        if status == "FINISHED":
            self.say("\nsending the results and the ensemble to MLflow ...")
            self.mirror.wait()


class SilentTracker(Tracker):
    def __init__(self) -> None:
        pass

    def open(self) -> None:
        pass

    def kept(self) -> dict[str, Any]:
        return {}

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        pass

    def summarise(self, step: int, epoch: float) -> None:
        pass

    def log(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        pass

    def log_system(self, step: int, figures: Mapping[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def close(self, status: str) -> None:
        pass


def start_mirror(run: Path) -> "subprocess.Popen[str]":
    """It learns how training ended from what is written to it, or from the silence after a crash."""
    ranks_own = ("WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", LAUNCHER)
    environment = {key: value for key, value in os.environ.items() if key not in ranks_own}
    return subprocess.Popen(
        [sys.executable, "-m", "dicedist.mirror", str(run), "--follow"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # signals to the ranks are not for it
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )


def warn(text: str) -> None:
    put(sys.stderr, f"dicedist: warning: {text}\n")


def put(stream: TextIO, text: str) -> None:
    """To a terminal or a log that may be on a full disk, or no longer read: no reason to lose a run."""
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()


def size_of(path: Path, lines: int) -> int:
    """Bytes of the first lines of a file, which is made if need be."""
    with path.open("a+b") as file:
        file.seek(0)
        return sum(map(len, itertools.islice(file, lines)))


class Progress:
    """A line that is written over on a terminal, plain lines now and then elsewhere; with the time left."""

    WIDTH = 24
    SHOWN = {
        "train/members/loss": "loss",
        "train/redundancy": "redundancy",
        "train/discriminator/accuracy": "w acc",
        "val/ensemble/accuracy": "val ens",
        "val/members/accuracy": "val members",
    }

    def __init__(self, total_steps: int, first_step: int, stream: TextIO | None = None):
        self.total, self.first = total_steps, first_step
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        self.started = self.shown_at = time.monotonic()
        self.latest: dict[str, float] = {}

    def show(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        self.latest |= {name: metrics[key] for key, name in self.SHOWN.items() if key in metrics}
        now = time.monotonic()
        final = step >= self.total or any(name.startswith("val/") for name in metrics)
        if not self.terminal and now - self.shown_at < 10 and not final:
            return
        self.shown_at = now
        pace = (now - self.started) / max(1, step - self.first)
        filled = round(self.WIDTH * step / self.total)
        figures = "  ".join(f"{name} {value:.3f}" for name, value in self.latest.items())
        bar = "█" * filled + "░" * (self.WIDTH - filled) if self.terminal else ""
        left = duration(pace * (self.total - step))
        text = f"{bar} step {step}/{self.total}  epoch {epoch:.2f}  {left} left  {figures}".strip()
        put(self.stream, f"\r\x1b[2K{text}" if self.terminal else f"{text}\n")

    def clear(self) -> None:
        if self.terminal:
            put(self.stream, "\r\x1b[2K")


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
