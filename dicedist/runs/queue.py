"""Runs jobs in order, as many at once as there is room for, each on its own GPUs."""

import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

import torch

from dicedist.cluster.process import EXIT_STOPPED
from dicedist.cluster.signals import Stopped
from dicedist.console.lines import duration, say
from dicedist.runs.jobs import Job
from dicedist.runs.warm import Fork

POLL = 0.5  # seconds


class Queue:
    """A job that fails does not end the others. directory: where the output of each job goes."""

    def __init__(self, jobs: Sequence[Job], ranks: int, at_once: int, directory: Path):
        self.waiting = [job for job in jobs if not job.finished]
        self.total, self.done = len(jobs), len(jobs) - len(self.waiting)
        self.already = self.done
        self.ranks, self.directory = ranks, directory
        self.free = list(range(at_once))
        self.running: dict[int, tuple[Job, Popen | Fork]] = {}
        self.failed: list[str] = []
        self.started = time.monotonic()

    def run(self) -> list[str]:
        """Run all jobs. Return the names of those that failed."""
        try:
            while self.waiting or self.running:
                while self.waiting and self.free:
                    self.start(self.waiting.pop(0), self.free.pop(0))
                for place, (job, process) in list(self.running.items()):
                    if (code := process.poll()) is not None:
                        del self.running[place]
                        self.free.append(place)
                        self.finish(job, code)
                time.sleep(POLL)
        except Stopped:
            for _, process in self.running.values():
                process.terminate()
            for _, process in self.running.values():
                process.wait()
            raise
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
        # Running jobs count as half done.
        jobs_left = len(self.waiting) + len(self.running) / 2
        left = (time.monotonic() - self.started) / (self.done - self.already + len(self.running) / 2) * jobs_left
        say(f"[{self.done}/{self.total}] {job.name}: {outcome}, {duration(left)} left")

    def log_of(self, job: Job) -> Path:
        return self.directory / f"{job.name}.log"


def last_words(log: Path) -> str:
    """Return the last line of a failed job's output, if possible one that dicedist wrote."""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("dicedist: ") and "warning" not in line]
    return (ours or lines or ["no output"])[-1].removeprefix("dicedist: ")


def gpus_of(place: int, ranks: int) -> list[int] | None:
    """Return the GPUs of the job at this place; None if there are too few to give it its own."""
    gpus = list(range(place * ranks, (place + 1) * ranks))
    return gpus if gpus[-1] < torch.cuda.device_count() else None
