"""Trainings that another program starts, one process group each: sweeps and the paper's tables."""

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
        """What the finished run found; None if there is none, or one of another length."""
        if not self.run.exists():
            return None
        trained = self.run.config()
        if (trained.epochs, trained.max_steps) != (self.config.epochs, self.config.max_steps):
            return None
        return self.run.result()

    def start(self, ranks: int, gpus: Sequence[int] | None = None, log: IO | None = None) -> subprocess.Popen:
        """Start or continue it, on some of the GPUs only, its output into a log."""
        launch = [] if ranks == 1 else ["dicedist.launch", f"--nproc_per_node={ranks}", "-m"]
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return subprocess.Popen(
            [sys.executable, "-m", *launch, "dicedist.train", *self.overrides],
            env={**os.environ, **visible},
            stdout=log,
            stderr=log,
        )


def num_devices() -> int:
    """GPUs, or on a CPU cores."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def ranks_for(config: Config) -> int:
    """A part a device, as far as they go."""
    size, needs_w, devices = config.ensemble.size, Method(config.method).adversarial is not None, num_devices()
    if not isinstance(size, int):
        return devices if devices > 2 or not needs_w else 1  # two devices would hold a single member beside w
    return min(devices, ranks_of(size, needs_w, config.ensemble.replicas))
