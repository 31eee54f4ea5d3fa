"""Background saving: training waits only while tensors are copied to the host, not while files are written.

    every rank    copy ── train ──────────────── report ── train ────────────────
    its writer       └──── write, fsync, hash ────┘  │
    rank 0's writer                                  └──── manifest, rename ────

The reports are sent with the reports of the training log, so a checkpoint needs no extra message. A checkpoint that
cannot be written causes a warning, and the one before it stays. A rank on a node that does not see rank 0's folder puts
its files into the store, from which rank 0's writer reads them.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dicedist.algorithm.parts import Part
from dicedist.cluster.control import Control
from dicedist.cluster.heartbeat import advance
from dicedist.cluster.transfer import FileTransfer
from dicedist.config.schema import CheckpointConfig
from dicedist.runs import checkpoint
from dicedist.runs.files import sync
from dicedist.runs.run import Run
from dicedist.runs.uploads import NoUploads

MOMENT = 0.2  # seconds
Report = dict[str, Any]  # files that a rank has written, or its error; empty if nothing is new


class Saver:
    """The saver of one rank, for the parts it hosts. Rank 0 decides when to save, and completes the checkpoint."""

    def __init__(
        self,
        run: Run,
        config: CheckpointConfig,
        steps_per_epoch: int,
        parts: Callable[[], Sequence[Part]],
        control: Control,
        step: int,
        warn: Callable[[str], None],
        transfer: FileTransfer | None = None,
        sees_folder: bool = True,
        uploads: NoUploads | None = None,
    ):
        self.uploads = uploads or NoUploads()
        self.transfer, self.sees_folder = transfer, sees_folder
        self.run, self.config, self.parts, self.control, self.warn = run, config, parts, control, warn
        every = (config.every_steps, config.every_epochs and config.every_epochs * steps_per_epoch)
        self.intervals = [steps for steps in every if steps]
        self.step, self.begun_at = step, time.monotonic()  # of the last started checkpoint
        self.failed = False  # True if the last checkpoint could not be written
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[Report] | None = None
        self.about: Mapping[str, Any] = {}
        self.records = b""
        self.reports: dict[int, Report] = {}
        self.completing: Future[str | None] | None = None
        self.busy = False

    def due(self, step: int) -> bool:
        """Return whether to save, on rank 0. A checkpoint in progress postpones the next one."""
        minutes = self.config.every_minutes
        late = minutes is not None and time.monotonic() - self.begun_at > 60 * minutes
        return not self.busy and (late or any(step // every > self.step // every for every in self.intervals))

    def start(self, step: int, about: Mapping[str, Any], records: bytes = b"") -> None:
        """Start a checkpoint. All ranks call this between the same two steps. about: content of the manifest."""
        self.step, self.begun_at, self.about, self.records = step, time.monotonic(), about, records
        self.busy, self.failed = True, False
        snapshots = {part.name: checkpoint.snapshot(part) for part in self.parts()}
        self.writing = self.thread.submit(self.write, step, snapshots)

    def forget(self) -> None:
        """Allow another checkpoint of the same step, which holds more parts."""
        self.step = -1

    def write(self, step: int, snapshots: Mapping[str, checkpoint.Tensors]) -> Report:
        """Write the parts into the checkpoint's folder, or into a temporary one and send them."""
        files: checkpoint.Files = {}
        try:
            self.refuse_removed()
            shared = contextlib.nullcontext(str(checkpoint.partial(self.run.checkpoints, step)))
            with shared if self.sees_folder else tempfile.TemporaryDirectory() as folder:
                for name, tensors in snapshots.items():
                    files |= checkpoint.write_part(Path(folder), name, tensors)
                    advance()
                if self.transfer and not self.sees_folder:
                    for name in files:
                        self.transfer.put(Path(folder) / name)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            return {"error": str(error)}
        return {"files": files, "sent": [] if self.sees_folder else [*files]}

    def refuse_removed(self) -> None:
        """Follow a renamed run folder; OSError if it was removed, because a partial run must not replace it."""
        if not self.run.follow() and not self.run.directory.is_dir():
            raise FileNotFoundError(f"{self.run} was removed")

    def report(self) -> Report:
        """Return what this rank has written since the last call, for rank 0."""
        if self.writing is None or not self.writing.done():
            return {}
        report, self.writing = self.writing.result(), None
        return report

    def receive(self, reports: Sequence[Report]) -> None:
        """Complete the checkpoint once all ranks have reported. Only rank 0 receives reports."""
        self.reports |= {rank: report for rank, report in enumerate(reports) if report}
        if len(self.reports) == self.control.world_size:
            self.completing = self.thread.submit(self.complete, [*self.reports.values()])
            self.reports = {}
            wait([self.completing], timeout=MOMENT)  # usually enough, so that the next checkpoint need not wait
        if self.completing is not None and self.completing.done():
            error, self.completing = self.completing.result(), None
            self.busy, self.failed = False, error is not None
            if error:
                self.warn(f"the checkpoint of step {self.step} could not be written, the one before it stays: {error}")

    def complete(self, reports: Sequence[Report]) -> str | None:
        """Add rank 0's part of the checkpoint, in the background. Return the error, if any."""
        try:
            for report in reports:
                if "error" in report:
                    raise OSError(report["error"])
            self.refuse_removed()
            files = {name: entry for report in reports for name, entry in report["files"].items()}
            draft = checkpoint.partial(self.run.checkpoints, self.step)
            files |= checkpoint.write_part(draft, checkpoint.RECORDS, checkpoint.pack_records(self.records))
            for name in [name for report in reports for name in report["sent"]]:
                assert self.transfer is not None
                self.transfer.take(draft / name)
                sync(draft / name)
                checkpoint.verify(draft, name, *files[name])
            spared = self.uploads.sending
            checkpoint.complete(self.run.checkpoints, self.step, files, self.about, self.config.keep, spared)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            checkpoint.discard(self.run.checkpoints)
            return str(error)
        self.uploads.soon()
        return None

    def finish(self) -> bool:
        """Wait for a checkpoint in progress, on all ranks. Return whether the last started one is on disk."""
        for _ in range(2):  # the files of all ranks, then the manifest
            for job in (self.writing, self.completing):
                if job is not None:
                    job.result()
            self.receive(self.control.report(self.report()))
        return not self.control.maximum(self.failed)


@contextlib.contextmanager
def reachable(saved: Path, lacking: Sequence[str], control: Control, transfer: FileTransfer | None) -> Iterator[Path]:
    """Yield rank 0's checkpoint folder, or a temporary copy of the parts in `lacking` on a rank that does not see it.

    All ranks call this."""
    records = control.report({"lacking": [f"{name}.safetensors" for name in lacking]})
    wanted = {name for record in records for name in record["lacking"]}
    if wanted and transfer:
        for name in sorted({checkpoint.MANIFEST, *wanted}):
            transfer.put(saved / name)
    if not lacking or transfer is None:
        yield saved
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in [checkpoint.MANIFEST, *(f"{name}.safetensors" for name in lacking)]:
            transfer.take(Path(folder) / name, keep=True)
        yield Path(folder)
