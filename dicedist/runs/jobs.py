"""Jobs: trainings and evaluations that a sweep, a study or the paper's tables start, each in its own processes."""

import contextlib
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import DEFAULT_SIZE, fitting, own_ranks, ranks_of
from dicedist.cluster.signals import Stopped
from dicedist.config import Config, compose_config
from dicedist.runs.run import Run

IMPORTED = ["dicedist.trainer", "torch._dynamo"]  # these imports start no threads and use no GPU
LIBRARY = "timm"  # imported as well for its networks; this takes seconds


@dataclass(frozen=True)
class Job:
    """A training."""

    name: str
    overrides: tuple[str, ...]

    @functools.cached_property
    def config(self) -> Config:
        return compose_config(self.overrides)

    @property
    def run(self) -> Run:
        return Run.of(self.config)

    @property
    def result(self) -> dict[str, Any] | None:
        """Return the evaluation of the finished run; None if there is none, or if the run has another length."""
        return self.run.result() if self.has_its_length else None

    @property
    def finished(self) -> bool:
        """Return whether the run is trained to its last step and, unless evaluate.test=false, evaluated."""
        if self.config.evaluate.test:
            return self.result is not None
        return self.has_its_length and self.run.ending() == "FINISHED"

    @property
    def has_its_length(self) -> bool:
        if not self.run.exists():
            return False
        trained = self.run.config()
        return (trained.epochs, trained.max_steps) == (self.config.epochs, self.config.max_steps)

    @property
    def command(self) -> list[str]:
        """Return the module to run, and its arguments."""
        return ["dicedist.train", *self.overrides]

    def start(self, ranks: int, gpus: Sequence[int] | None = None, log: IO | None = None) -> "Process":
        """Start or resume the job on the given GPUs, with its output in the log.

        ranks: the most to start. A run with fewer parts starts fewer.
        """
        ranks = min(ranks, most_ranks(self.config) or ranks)
        if ranks == 1 and log is not None and not torch.cuda.is_available():
            foreign = self.config.network.name.startswith(f"{LIBRARY}/")
            return Fork(self.command, log.name, [*IMPORTED, LIBRARY] if foreign else IMPORTED)
        launch = [] if ranks == 1 else ["dicedist.launch", f"--nproc_per_node={ranks}", "-m"]
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return subprocess.Popen(
            [sys.executable, "-m", *launch, *self.command],
            env={**os.environ, **visible},
            stdout=log,
            stderr=log,
        )


@dataclass(frozen=True)
class ShiftJob(Job):
    """The evaluation of a trained run on shifted images."""

    request: tuple[str, ...] = ()  # of dicedist evaluate

    @property
    def command(self) -> list[str]:
        return ["dicedist.evaluate", *self.request]

    @property
    def finished(self) -> bool:
        return bool((self.result or {}).get("shift"))


def num_devices() -> int:
    """Return the number of GPUs, or of CPU cores if there is no GPU."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def ranks_for(config: Config) -> int:
    """Return one rank per part, at most one per device. ensemble.size=auto counts as four members."""
    usual = ranks_of(DEFAULT_SIZE, needs_w(config), config.ensemble.replicas, config.redundancy.ranks)
    return min(num_devices(), most_ranks(config) or usual)


def most_ranks(config: Config) -> int | None:
    """Return the number of parts; None with ensemble.size=auto, whose size follows the number of ranks."""
    size, replicas = config.ensemble.size, config.ensemble.replicas
    return ranks_of(size, needs_w(config), replicas, config.redundancy.ranks) if isinstance(size, int) else None


def needs_w(config: Config) -> bool:
    return Method.to_train(config.method).counterpart is not None


def of_one_size(jobs: Sequence[Job], ranks: int) -> tuple[list[Job], int | None]:
    """Give all jobs the smallest size if ensemble.size=auto would differ between them, so that they are comparable.

    ranks: the ranks of each job. The returned size is None if nothing was changed.
    """
    sizes = {job.name: auto_size(job.config, ranks) for job in jobs if job.config.ensemble.size == "auto"}
    if len(set(sizes.values())) < 2:
        return list(jobs), None
    size = min(sizes.values())
    sized = [Job(job.name, (*job.overrides, f"ensemble.size={size}")) if job.name in sizes else job for job in jobs]
    return sized, size


def auto_size(config: Config, ranks: int) -> int:
    return fitting(ranks, own_ranks(needs_w(config), config.redundancy.ranks), config.ensemble.replicas)


class Fork:
    """A command as a fork of a process that has already imported torch, with the interface of Popen.

    A fork starts seconds sooner than `python -m dicedist.train`, and also has its own memory, signals and exit code.
    log: file to which its output is appended. imported: modules that the first fork imports for all others.
    """

    def __init__(self, command: Sequence[str], log: str, imported: Sequence[str]):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(imported))
        self.process = context.Process(target=execute, args=(list(command), log))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


Process = subprocess.Popen | Fork


@contextlib.contextmanager
def ended_on_stop(processes: Callable[[], Sequence[Process]]) -> Iterator[None]:
    """Inside the context, a request to stop ends these processes, too."""
    try:
        yield
    except Stopped:
        for process in processes():
            process.terminate()
        for process in processes():
            process.wait()
        raise


def execute(command: list[str], log: str) -> None:
    """Run the command inside the fork."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
