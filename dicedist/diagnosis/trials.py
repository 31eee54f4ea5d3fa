"""Starts the trainings of the acceptance in processes of their own, on the device that is accepted or on the CPU."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from dicedist.diagnosis.finding import Finding, Lacking

LIMIT = 900  # seconds for one training
COMMON = ("tracking=none", "schedules.scale=false", "schedules.ramp_up=1", "schedules.covariance=[0,2]")
ON_A_GPU = ("data=shapes", "network=resnet32", "batch_size=128")
TINY = ("data=shapes", "network=resnet8", "data.train_limit=256", "batch_size=16")

Values = dict[str, float]


class Trial(NamedTuple):
    values: list[Values]  # of all ranks, for each step
    bytes: list[dict[str, int]]  # by rank, what its parts were said to need and what they took


@dataclass(frozen=True)
class Machine:
    """The device that is compared with the CPU, and how large the trainings are."""

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def most_ranks(self) -> int:
        """Ranks that have a GPU each; on the CPU they share the cores."""
        return torch.cuda.device_count() if self.on_gpu else 5

    @property
    def steps(self) -> int:
        return 20 if self.on_gpu else 4

    @property
    def keys(self) -> tuple[str, ...]:
        return (*COMMON, *(ON_A_GPU if self.on_gpu else TINY))

    @functools.cache  # noqa: B019  (a machine lives as long as the process)
    def trial(self, ranks: int, keys: tuple[str, ...], on_cpu: bool = False) -> Trial:
        """TF32 is off."""
        file = Path(tempfile.mkstemp(dir=self.folder, suffix=".json")[1])
        self.start(["dicedist.diagnosis.trial", str(file), str(self.steps), *self.keys, *keys], ranks, on_cpu)
        by_rank = json.loads(file.read_text())
        values = [
            {n: value for rank in by_rank for n, value in rank["values"][nth].items()} for nth in range(self.steps)
        ]
        return Trial(values, [rank["bytes"] for rank in by_rank])

    def start(self, words: Sequence[str], ranks: int = 1, on_cpu: bool = False) -> str:
        """Run a module, under the launcher if it has several ranks; return what it printed."""
        launcher = ["dicedist.launch", f"--nproc_per_node={ranks}", "--max-restarts=0", "-m"] if ranks > 1 else []
        command = [sys.executable, "-m", *launcher, *words]
        environment = self.environment(ranks, on_cpu)
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=self.folder, check=False
        )
        if ended.returncode != 0:
            said = " ".join((ended.stderr or ended.stdout).split())[-400:]
            raise RuntimeError(f"{' '.join(words)} ended with code {ended.returncode}: {said}")
        return ended.stdout

    @contextlib.contextmanager
    def launched(self, words: Sequence[str], ranks: int) -> Iterator[subprocess.Popen[bytes]]:
        """A module under the launcher, which starts its ranks again if one is lost; ended when the context is left."""
        command = [sys.executable, "-m", "dicedist.launch", f"--nproc_per_node={ranks}", "-m", *words]
        with tempfile.TemporaryFile(dir=self.folder) as log:
            begun = subprocess.Popen(command, env=self.environment(ranks), cwd=self.folder, stdout=log, stderr=log)
            try:
                yield begun
            finally:
                if begun.poll() is None:
                    begun.terminate()
                    begun.wait(LIMIT)

    def environment(self, ranks: int, on_cpu: bool = False) -> dict[str, str]:
        """The variables of a training; a machine with too few GPUs lacks it."""
        if ranks > self.most_ranks:
            raise Lacking(f"needs {ranks} GPUs")
        hidden = {} if self.on_gpu and not on_cpu else {"CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", **hidden}


Check = Callable[[Machine], Finding]
