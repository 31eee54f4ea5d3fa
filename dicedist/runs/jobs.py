"""Training runs that another program starts, for sweeps and the paper's tables, each in its own processes."""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import ranks_of
from dicedist.config import Config, compose_config
from dicedist.runs.run import Run
from dicedist.runs.warm import Fork


@dataclass(frozen=True)
class Job:
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
        """The evaluation of the finished run; None if there is none, or if the run has another length."""
        return self.run.result() if self.has_its_length else None

    @property
    def finished(self) -> bool:
        """Whether the run is trained to its end and, unless evaluate.test=false, measured."""
        if self.config.evaluate.test:
            return self.result is not None
        return self.has_its_length and self.run.ending() == "FINISHED"

    @property
    def has_its_length(self) -> bool:
        if not self.run.exists():
            return False
        trained = self.run.config()
        return (trained.epochs, trained.max_steps) == (self.config.epochs, self.config.max_steps)

    def start(self, ranks: int, gpus: Sequence[int] | None = None, log: IO | None = None) -> subprocess.Popen | Fork:
        """Starts or continues the run, on the given GPUs only, with its output in the log."""
        if ranks == 1 and log is not None and not torch.cuda.is_available():
            return Fork(self.overrides, log.name)
        launch = [] if ranks == 1 else ["dicedist.launch", f"--nproc_per_node={ranks}", "-m"]
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return subprocess.Popen(
            [sys.executable, "-m", *launch, "dicedist.train", *self.overrides],
            env={**os.environ, **visible},
            stdout=log,
            stderr=log,
        )


def num_devices() -> int:
    """The number of GPUs, or of CPU cores if there is no GPU."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def ranks_for(config: Config) -> int:
    """One rank per part, as far as there are devices."""
    size, needs_w, devices = config.ensemble.size, Method(config.method).counterpart is not None, num_devices()
    if not isinstance(size, int):
        return devices if devices > 2 or not needs_w else 1  # two would hold the discriminator w and only one member
    return min(devices, ranks_of(size, needs_w, config.ensemble.replicas, config.redundancy.ranks))
