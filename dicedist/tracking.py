"""What a run leaves behind and shows: metrics.jsonl and progress. Ranks that do not report hold a silent tracker."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor


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

    def drain(self) -> tuple[dict[str, float], str | None]:
        """Means over the steps since the last call, and what went wrong first, if anything did."""
        rows = torch.stack(self.rows).tolist() if self.rows else []
        fault = self.first_fault(rows)
        columns = zip(*rows, strict=True)
        means = {name: math.fsum(column) / len(rows) for name, column in zip(self.names, columns, strict=bool(rows))}
        self.steps, self.rows = [], []
        return {name: value for name, value in means.items() if not name.startswith("out_of_step/")}, fault

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
    """The records of a run, on the reporting rank."""

    def __init__(self, run: Path, total_steps: int, first_step: int):
        self.path = run / "metrics.jsonl"
        keep_until(self.path, first_step)
        self.file = self.path.open("a")
        self.progress = Progress(total_steps, first_step)

    def log(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, "epoch": round(epoch, 4), **metrics}) + "\n")
        self.file.flush()
        self.progress.show(step, epoch, metrics)

    def say(self, text: str) -> None:
        self.progress.clear()
        print(text, flush=True)

    def close(self) -> None:
        self.progress.clear()
        self.file.close()


class SilentTracker(Tracker):
    def __init__(self) -> None:
        pass

    def log(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def keep_until(path: Path, step: int) -> None:
    """Drop records behind the checkpoint that a run continues from: those steps are run again."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except ValueError:
            break  # a line cut off by a crash
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines))
    partial.rename(path)


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
        self.stream.write(f"\r\x1b[2K{text}" if self.terminal else text + "\n")
        self.stream.flush()

    def clear(self) -> None:
        if self.terminal:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
