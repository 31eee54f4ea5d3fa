"""Start the trainings of the acceptance in their own processes, on the accepted device or on the CPU."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dicedist.diagnosis.finding import Finding, Lacking
from dicedist.diagnosis.trial import Case

LIMIT = 900  # seconds for one training
COMMON = (
    "tracking=none", "log.every_steps=1", "schedules.scale=false", "schedules.ramp_up=1", "schedules.covariance=[0,2]",
    "data=shapes", "data.pipeline=torch",
)  # fmt: skip
SMALL = ("network=resnet20", "data.train_limit=640", "batch_size=32")  # on a GPU; the CPU runs it too, for comparison
TINY = ("network=resnet8", "data.train_limit=256", "batch_size=16")  # on a CPU
TIMED = ("tracking=none", "data=shapes", "network=resnet32", "batch_size=128")

Values = dict[str, float]
Place = tuple[int, bool, tuple[str, ...]]  # ranks, on the CPU, variables


class Trial(NamedTuple):
    values: list[Values]  # of all ranks, for each step
    disturbed: list[Values]  # of the twin; equal to `values` without a twin
    bytes: list[dict[str, int]]  # by rank, the forecast and the actual memory of its parts


class Start(NamedTuple):
    """A case, and the processes that run it."""

    ranks: int
    case: Case
    on_cpu: bool = False
    variables: tuple[str, ...] = ()  # of the environment, NAME=VALUE


@dataclass(frozen=True)
class Machine:
    """The device that is compared with the CPU, and the size of the trainings."""

    device: str
    folder: Path
    known: dict[tuple[Place, Case], Trial] = field(default_factory=dict, compare=False)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def most_ranks(self) -> int:
        """Return the number of ranks with a GPU each; on the CPU ranks share the cores."""
        return torch.cuda.device_count() if self.on_gpu else 5

    @property
    def steps(self) -> int:
        return 10 if self.on_gpu else 4

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the config keys of trainings that are compared."""
        return (*COMMON, *(SMALL if self.on_gpu else TINY))

    @property
    def timed_keys(self) -> tuple[str, ...]:
        """Return the config keys of trainings that are timed."""
        return TIMED if self.on_gpu else self.keys

    def trial(self, start: Start) -> Trial:
        """Run a case, or return the outcome of an earlier run."""
        place = self.place_of(start)
        if (place, start.case) not in self.known:
            self.run(place, [start.case])
        return self.known[place, start.case]

    def prepare(self, starts: Iterable[Start]) -> None:
        """Run cases together that need the same processes.

        If one case fails, each of them runs alone when it is needed, and reports its own failure.
        """
        together = dict[Place, list[Case]]()
        for start in starts:
            together.setdefault(self.place_of(start), []).append(start.case)
        for place, cases in together.items():
            with contextlib.suppress(Lacking, RuntimeError, subprocess.TimeoutExpired):
                self.run(place, list(dict.fromkeys(cases)))

    def place_of(self, start: Start) -> Place:
        return start.ranks, start.on_cpu or not self.on_gpu, start.variables

    def run(self, place: Place, cases: Sequence[Case]) -> None:
        ranks, on_cpu, variables = place
        full = [asdict(case) | {"keys": [*self.keys, *case.keys]} for case in cases]
        file = Path(tempfile.mkstemp(dir=self.folder, suffix=".json")[1])
        words = ["dicedist.diagnosis.trial", str(file), str(self.steps), json.dumps(full)]
        self.start(words, ranks, on_cpu, variables)
        for case, by_rank in zip(cases, json.loads(file.read_text()), strict=True):
            self.known[place, case] = joined(by_rank)

    def start(self, words: Sequence[str], ranks: int = 1, on_cpu: bool = False, variables: Sequence[str] = ()) -> str:
        """Run a module, under the launcher if it has several ranks. Return its output."""
        launcher = ["dicedist.launch", f"--nproc_per_node={ranks}", "--max-restarts=0", "-m"] if ranks > 1 else []
        command = [sys.executable, "-m", *launcher, *words]
        environment = self.environment(ranks, on_cpu) | dict(one.split("=") for one in variables)
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=self.folder, check=False
        )
        if ended.returncode != 0:
            said = " ".join((ended.stderr or ended.stdout).split())[-400:]
            raise RuntimeError(f"{' '.join(words)[:200]} ended with code {ended.returncode}: {said}")
        return ended.stdout

    @contextlib.contextmanager
    def launched(self, words: Sequence[str], ranks: int) -> Iterator[subprocess.Popen[bytes]]:
        """Start a module under the launcher, which restarts lost ranks; end it when the context ends."""
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
        """Return the environment of a training, with TF32 off. Raise Lacking if there are too few GPUs."""
        if ranks > self.most_ranks:
            raise Lacking(f"needs {ranks} GPUs")
        hidden = {} if self.on_gpu and not on_cpu else {"CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0", **hidden}


def joined(by_rank: Sequence[Mapping[str, Any]]) -> Trial:
    """Join the values of all ranks, step by step."""

    def by_step(kind: str) -> list[Values]:
        ranks = zip(*(rank[kind] for rank in by_rank), strict=True)
        return [{name: value for own in step for name, value in own.items()} for step in ranks]

    return Trial(by_step("values"), by_step("disturbed"), [rank["bytes"] for rank in by_rank])


Check = Callable[[Machine], Finding]
