"""Saving in the background: training waits while tensors are copied to the host, not while files are written.

    every rank    copy ── train ──────────────── report ── train ────────────────
    its writer       └──── write, fsync, hash ────┘  │
    rank 0's writer                                  └──── manifest, rename ────

The reports travel with those of the training log, so that no message is sent for a checkpoint alone. A checkpoint that
cannot be written is a warning: the one before it stays. A rank on a node that does not see rank 0's folder leaves its
files on the shelf instead, from which rank 0's writer takes them.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dicedist import checkpoint
from dicedist.config import CheckpointConfig
from dicedist.exchange import Exchange
from dicedist.parts import Part
from dicedist.shelf import Shelf
from dicedist.tracking import RECORDS

Report = dict[str, Any]  # the files that a rank has written, or its error; empty if there is nothing new


class Saver:
    """Every rank has one, for the parts that it answers for. Rank 0 decides when, and completes."""

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        steps_per_epoch: int,
        parts: Sequence[Part],
        exchange: Exchange,
        step: int,
        warn: Callable[[str], None],
        shelf: Shelf | None = None,
        sees_folder: bool = True,
    ):
        self.shelf, self.sees_folder = shelf, sees_folder
        self.run, self.config, self.parts, self.exchange, self.warn = run, config, parts, exchange, warn
        every = (config.every_steps, config.every_epochs and config.every_epochs * steps_per_epoch)
        self.intervals = [steps for steps in every if steps]
        self.step, self.begun_at = step, time.monotonic()  # of the last checkpoint begun
        self.failed = False  # it could not be written
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[Report] | None = None
        self.about: Mapping[str, Any] = {}
        self.reports: dict[int, Report] = {}
        self.completing: Future[str | None] | None = None
        self.busy = False

    def due(self, step: int) -> bool:
        """On rank 0. While a checkpoint is under way the next one waits for its turn, and training for neither."""
        minutes = self.config.every_minutes
        late = minutes is not None and time.monotonic() - self.begun_at > 60 * minutes
        return not self.busy and (late or any(step // every > self.step // every for every in self.intervals))

    def start(self, step: int, about: Mapping[str, Any]) -> None:
        """All ranks call, between the same two steps. about: for the manifest, of rank 0."""
        self.step, self.begun_at, self.about = step, time.monotonic(), about
        self.busy, self.failed = True, False
        snapshots = {part.name: checkpoint.snapshot(part) for part in self.parts}
        self.writing = self.thread.submit(self.write, step, snapshots)

    def write(self, step: int, snapshots: Mapping[str, checkpoint.Tensors]) -> Report:
        files: checkpoint.Files = {}
        try:
            with self.folder_for(step) as folder:
                for name, tensors in snapshots.items():
                    files |= checkpoint.write_part(folder, name, tensors)
                if self.shelf and not self.sees_folder:
                    for name in files:
                        self.shelf.put(folder / name)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            return {"error": str(error)}
        return {"files": files, "shelved": [] if self.sees_folder else [*files]}

    @contextlib.contextmanager
    def folder_for(self, step: int) -> Iterator[Path]:
        """Where this rank writes: the checkpoint itself, or a place from which its files go on the shelf."""
        if self.sees_folder:
            yield checkpoint.partial(self.run, step)
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def report(self) -> Report:
        """For rank 0: what this rank has written since it was last asked."""
        if self.writing is None or not self.writing.done():
            return {}
        report, self.writing = self.writing.result(), None
        return report

    def receive(self, reports: Sequence[Report]) -> None:
        """On rank 0, with a report of each rank; the others have received none, and nothing to do."""
        self.reports |= {rank: report for rank, report in enumerate(reports) if report}
        if len(self.reports) == self.exchange.placement.world_size:
            self.completing = self.thread.submit(self.complete, [*self.reports.values()])
            self.reports = {}
        if self.completing is not None and self.completing.done():
            error, self.completing = self.completing.result(), None
            self.busy, self.failed = False, error is not None
            if error:
                self.warn(f"the checkpoint of step {self.step} could not be written, the one before it stays: {error}")

    def complete(self, reports: Sequence[Report]) -> str | None:
        """What went wrong, if anything did."""
        try:
            for report in reports:
                if "error" in report:
                    raise OSError(report["error"])
            checkpoint.sync(self.run / RECORDS)  # the manifest says how many there are
            files = {name: entry for report in reports for name, entry in report["files"].items()}
            self.fetch({name: files[name] for report in reports for name in report["shelved"]})
            checkpoint.complete(self.run, self.step, files, self.about, self.config.keep)
        except (OSError, RuntimeError, ValueError) as error:
            checkpoint.discard(self.run)
            return str(error)
        return None

    def fetch(self, files: checkpoint.Files) -> None:
        """What was written by ranks that do not see this folder."""
        draft = checkpoint.partial(self.run, self.step)
        draft.mkdir(parents=True, exist_ok=True)
        for name, (size, sha256) in files.items():
            assert self.shelf is not None
            self.shelf.take(draft / name)
            checkpoint.sync(draft / name)
            checkpoint.verify(draft, name, size, sha256)

    def finish(self) -> bool:
        """All ranks call, and wait for the checkpoint under way; whether the last one begun is on the disk."""
        for _ in range(2):  # the files of all ranks, then the manifest
            for job in (self.writing, self.completing):
                if job is not None:
                    job.result()
            self.receive(self.exchange.report(self.report()))
        return not self.exchange.any_rank(self.failed)


@contextlib.contextmanager
def reachable(saved: Path, lacking: Sequence[str], exchange: Exchange, shelf: Shelf | None) -> Iterator[Path]:
    """All ranks call: a folder with the checkpoint that rank 0 keeps, or of one that cannot be seen from here the parts
    that this rank lacks."""
    records = exchange.report({"lacking": [f"{name}.safetensors" for name in lacking]})
    wanted = {name for record in records for name in record["lacking"]}
    if wanted and shelf:
        for name in sorted({checkpoint.MANIFEST, *wanted}):
            shelf.put(saved / name)
    if not lacking or shelf is None:
        yield saved
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in [checkpoint.MANIFEST, *(f"{name}.safetensors" for name in lacking)]:
            shelf.take(Path(folder) / name, keep=True)
        yield Path(folder)
