"""Removable files: cached images and copies of runs, which can be made again, and old checkpoints."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from dicedist.console.lines import warn
from dicedist.data.prepared import home
from dicedist.runs import checkpoint
from dicedist.runs.lock import run_lock
from dicedist.runs.run import Run


@dataclass(frozen=True)
class Removable:
    kind: str  # data | checkpoints
    path: Path
    why: str
    run: Run | None = None  # run of the checkpoints, which must not be in use

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def remove(self) -> None:
        with run_lock(self.run) if self.run else contextlib.nullcontext():
            shutil.rmtree(self.path)


def find_removable(runs: Path) -> list[Removable]:
    prepared = [path for path in sorted((home() / "prepared").glob("*")) if path.is_dir()]
    found = [Removable("data", path, "made again from its files when it is needed") for path in prepared]
    copies = [path for path in sorted((home() / "runs").glob("*")) if path.is_dir()]
    found += [Removable("data", path, "a run of a bucket, copied again when it is needed") for path in copies]
    for run in Run.all_in(runs, below="**"):
        try:
            newest = run.newest_checkpoint()
        except ValueError as error:
            warn(f"{error}; {run} is left alone")
            continue
        best = None if newest is None else checkpoint.best_step(newest.about)
        kept = (newest.step, best) if newest is not None else ()
        older = [path for path in checkpoint.saved(run.checkpoints) if kept and checkpoint.step_of(path) not in kept]
        found += [Removable("checkpoints", path, "a newer one is intact", run) for path in older]
    return found
