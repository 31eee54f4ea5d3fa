"""Run jobs in order, several at once if devices allow, each on its own GPUs."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dicedist.cluster.process import EXIT_STOPPED
from dicedist.cluster.signals import Stopped
from dicedist.console.lines import duration, say
from dicedist.console.progress import Progress
from dicedist.runs.jobs import Job, Process, ended_on_stop

POLL = 0.5  # seconds
INTERVAL = 60.0  # seconds between two lines of progress without a terminal
TAIL = 8192  # bytes at the end of a log that are searched for the last line of progress
STEPS = re.compile(r"^step ([\d,]+)/([\d,]+)", re.MULTILINE)


class Queue:
    """A queue of jobs. A failed job does not end the others. directory: folder of the jobs' logs."""

    def __init__(self, jobs: Sequence[Job], ranks: int, at_once: int, directory: Path):
        self.waiting = [job for job in jobs if not job.finished]
        self.total, self.done = len(jobs), len(jobs) - len(self.waiting)
        self.ranks, self.directory = ranks, directory
        self.free = list(range(at_once))
        self.running: dict[int, tuple[Job, Process]] = {}
        self.failed: list[str] = []
        self.progress = Progress(self.total, "runs", self.done, interval=INTERVAL)

    def run(self) -> list[str]:
        """Run all jobs. Return the names of the failed ones."""
        with ended_on_stop(lambda: [process for _, process in self.running.values()]):
            while self.waiting or self.running:
                while self.waiting and self.free:
                    self.start(self.waiting.pop(0), self.free.pop(0))
                for place, (job, process) in list(self.running.items()):
                    if (code := process.poll()) is not None:
                        del self.running[place]
                        self.free.append(place)
                        self.finish(job, code)
                self.show()
                time.sleep(POLL)
        return self.failed

    def start(self, job: Job, place: int) -> None:
        gpus = gpus_of(place, self.ranks)
        with self.log_of(job).open("a") as log:
            self.running[place] = job, job.start(self.ranks, gpus, log)

    def finish(self, job: Job, code: int) -> None:
        if code == EXIT_STOPPED:
            raise Stopped
        self.done += 1
        if code != 0 or not job.finished:
            self.failed.append(job.name)
            outcome = f"failed: {last_words(self.log_of(job))}"
        elif (valid := job.run.last_validation("ensemble/accuracy")) is not None:
            outcome = f"validation {100 * valid:.2f} %"
        elif (result := job.result) is not None:
            outcome = f"test {100 * result['ensemble']['accuracy']:.2f} %"
        else:
            outcome = "done"
        left = self.progress.left(self.done + sum(share for share, _ in self.steps().values()))
        self.progress.clear()
        say(f"[{self.done}/{self.total}] {job.name}: {outcome}, {duration(left)} left")

    def show(self) -> None:
        """Show the number of finished runs, and the step of each running one."""
        if steps := self.steps():
            figures = "  ".join(f"{name}: {words}" for name, (_, words) in steps.items())
            self.progress.show(self.done + sum(share for share, _ in steps.values()), figures)

    def steps(self) -> dict[str, tuple[float, str]]:
        """Return the progress of each running job: the share of its steps, and the same as text."""
        return {job.name: last_step(self.log_of(job)) for job, _ in self.running.values()}

    def log_of(self, job: Job) -> Path:
        return self.directory / f"{job.name}.log"


def last_step(log: Path) -> tuple[float, str]:
    """Return the progress of a job by its log: the share of its steps, and the same as text."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - TAIL))
        found = STEPS.findall(file.read().decode(errors="replace"))
    if not found:
        return 0.0, "starts"
    done, total = (int(number.replace(",", "")) for number in found[-1])
    return done / max(1, total), f"step {found[-1][0]}/{found[-1][1]}"


def last_words(log: Path) -> str:
    """Return the last line of a failed job's output, preferably one that dicedist wrote."""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("dicedist: ") and "warning" not in line]
    return (ours or lines or ["no output"])[-1].removeprefix("dicedist: ")


def gpus_of(place: int, ranks: int) -> list[int] | None:
    """Return the GPUs of the job at this place in the queue; None if there are too few for separate GPUs."""
    gpus = list(range(place * ranks, (place + 1) * ranks))
    return gpus if gpus[-1] < torch.cuda.device_count() else None
