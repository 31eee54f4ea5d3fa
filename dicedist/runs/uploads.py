"""Upload the files of a run to a bucket, in a thread of rank 0 during training.

    training       ── checkpoint ──── checkpoint ──── ... ──── results ── waits ──
    its thread           └── parts, manifest, records ──┘            └── the rest ──┘

After each notice the thread compares the whole folder with the bucket, so anything missed is picked up by the next
retry. The manifest of a checkpoint is sent last, and only then are older checkpoints removed. Failures of the bucket do
not stop training: the thread warns once, and tries again.
"""

import contextlib
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dicedist.cluster.heartbeat import advance
from dicedist.config import Config
from dicedist.runs import checkpoint, copies, resume
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import MANIFEST
from dicedist.runs.copies import folder_of, name_of
from dicedist.runs.files import digest, read_plain
from dicedist.runs.lease import Lease, Lost
from dicedist.runs.run import Run

LIMIT = 600.0  # seconds that a finished or stopped training waits for the bucket at most
GOING_BACK = 60.0  # seconds that a training waits until the bucket has removed later checkpoints
PAUSES = (1.0, 60.0)  # seconds between two attempts, the first and the longest
MOMENT = 0.2
AT_ONCE = 2**26  # bytes of a file that is sent from memory, at most


class NoUploads:
    """Uploads that do nothing, for a run without run.remote and for every rank but rank 0."""

    sending: Path | None = None  # the checkpoint that is being sent, which must not be removed

    def begin(self) -> None:
        """Download the files that only the bucket has, and start to upload."""

    def soon(self) -> None:
        """Notify the thread of new files in the folder."""

    def go_back(self, step: int) -> None:
        """Remove the checkpoints after this step, because the run has gone back to it."""

    def finish(self) -> bool:
        """Wait up to LIMIT seconds. Return whether the bucket has everything."""
        return True


@contextlib.contextmanager
def uploading(run: Run, config: Config, warn: Callable[[str], None]) -> Iterator[NoUploads]:
    """Hold the lease of the bucket inside the context, which rank 0 enters with the lock of the run."""
    if (bucket := Bucket.of(config)) is None:
        yield NoUploads()
        return
    uploads = Uploads(run, bucket, config, warn)
    try:
        yield uploads
    finally:
        uploads.lease.release()


class Uploads(NoUploads):
    def __init__(self, run: Run, bucket: Bucket, config: Config, warn: Callable[[str], None]):
        self.run, self.bucket, self.config, self.warn = run, bucket, config, warn
        self.lease = Lease(self.bucket)
        self.news = threading.Event()
        self.asked = self.sent = 0  # number of notices, and of notices whose files have arrived
        self.failing = False
        self.begun = False  # the folder of the run was there
        self.back_to: int | None = None  # step after which the bucket must keep no checkpoint
        self.there: dict[int, bytes] | None = None  # manifests in the bucket, by step; None: unknown
        self.marks: dict[str, tuple[int, ...]] = {}  # state on the disk of the files in the bucket

    def begin(self) -> None:
        try:
            self.lease.take()
            self.bring_back()
        except OSError as error:
            if not (resume.restarted(self.run) and self.run.newest_checkpoint()):
                raise ValueError(f"run.remote={self.bucket} does not answer: {error}") from error
            self.warn_once(error)  # a restart of the launch that began the run has everything on its disk
        threading.Thread(target=self.live, name="uploads", daemon=True).start()
        self.soon()

    def bring_back(self) -> None:
        """Download the run if the bucket is ahead of the disk, because the run was begun or continued elsewhere."""
        there = self.bucket.listed()
        saved = resume.saved_in_bucket(self.bucket)
        if saved is None:
            return
        steps, held = {*copies.manifests(self.bucket, there)}, self.run.newest_checkpoint()
        named = None if resume.restarted(self.run) else self.config.resuming.step
        missing = named in steps if named else bool(steps) and (held is None or max(steps) > held.step)
        resume.refuse_foreign(saved, self.config, str(self.bucket), begun=bool(steps))
        if self.run.exists():
            held_here = resume.Saved(self.run.config(), self.run.plan())
            resume.refuse_foreign(held_here, self.config, str(self.run), begun=False)
            if not missing:
                return
        if missing:
            copies.fetch_newest(self.bucket, self.run, self.warn, only=named)
            if self.run.newest_checkpoint() is None:
                raise ValueError(f"{self.bucket} has no intact checkpoint: choose another run.name")
        copies.bring_files(self.bucket, self.run, there)

    def soon(self) -> None:
        self.asked += 1
        self.news.set()

    def go_back(self, step: int) -> None:
        self.back_to = step
        if not self.finish(GOING_BACK):
            self.warn(f"{self.bucket} still has later checkpoints than step {step}: a lost disk would bring them back")

    def finish(self, limit: float | None = None) -> bool:
        self.soon()
        wanted, deadline = self.asked, time.monotonic() + (limit or LIMIT)
        while self.sent < wanted and time.monotonic() < deadline and not self.lease.lost:
            time.sleep(MOMENT)
            advance()
        return self.sent >= wanted

    def live(self) -> None:
        pause = PAUSES[0]
        while not self.lease.leaving.is_set():
            self.news.wait(pause if self.failing else None)
            self.news.clear()
            asked = self.asked
            try:
                self.bring()
            except Lost as error:
                self.warn(f"{error}: nothing more is sent there")
                return
            except (OSError, ValueError) as error:
                self.warn_once(error)
                self.there, pause = None, min(2 * pause, PAUSES[1])
                continue
            if self.failing:
                self.warn(f"{self.bucket} answers again, and has received everything")
            self.sent, self.failing, pause = asked, False, PAUSES[0]

    def warn_once(self, error: Exception) -> None:
        if not self.failing:
            self.warn(f"the run could not be sent to {self.bucket}, it is tried again: {error}")
        self.failing = True

    def bring(self) -> None:
        """Synchronize the bucket with the folder."""
        if not self.lease.held:
            self.lease.take()
        self.lease.confirm()
        if not self.run.exists() and not self.begun:
            return  # nothing is written yet
        if not self.run.exists():
            raise FileNotFoundError(f"{self.run} was removed, or renamed")  # the bucket stays as it is
        self.begun = True
        if self.there is None:
            self.there = copies.manifests(self.bucket, self.bucket.listed())
        if (last := self.back_to) is not None:
            for step in [step for step in self.there if step > last]:
                self.bucket.remove([f"{folder_of(step)}/{MANIFEST}"])  # `thin_out` removes the rest
                del self.there[step]
            self.back_to = None
        self.send_file(self.run.config_file)
        try:
            self.send_newest(self.there)
        finally:
            self.sending = None
        for path in [*self.run.files_to_send, *(path for aside in self.run.variations for path in aside.files)]:
            self.send_file(path)

    def send_newest(self, there: dict[int, bytes]) -> None:
        """Send the newest checkpoint and the best one, if the bucket lacks them. Other checkpoints are not sent."""
        saved = checkpoint.saved(self.run.checkpoints)
        if not saved:
            return
        best = checkpoint.best_step(checkpoint.read(saved[-1], []).about)
        for path in [path for path in saved if path == saved[-1] or checkpoint.step_of(path) == best]:
            self.send_checkpoint(path, there)
        self.thin_out(there, checkpoint.step_of(saved[-1]), best)

    def send_checkpoint(self, path: Path, there: dict[int, bytes]) -> None:
        self.sending = path
        step, text = checkpoint.step_of(path), (path / MANIFEST).read_bytes()
        if there.get(step) == text:
            return
        found = checkpoint.read(path)
        there.pop(step, None)
        self.bucket.remove([f"{folder_of(step)}/{MANIFEST}"])
        for name, (_, sha256) in found.files.items():
            self.bucket.send(found.path / name, f"{folder_of(step)}/{name}", sha256)
        self.lease.confirm()
        self.bucket.write(f"{folder_of(step)}/{MANIFEST}", text)
        there[step] = text

    def thin_out(self, there: dict[int, bytes], last: int, best: int | None) -> None:
        """Remove old checkpoints by the rule for the disk, and all files of checkpoints without a manifest."""
        losses = {step: checkpoint.loss_in(text) for step, text in there.items()}
        for step in checkpoint.superfluous(losses, last, self.config.checkpoint.keep, best):
            del there[step]
        names = [name for name in self.bucket.listed() if copies.step_in(name) not in (None, *there)]
        self.bucket.remove(sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")))  # manifests first

    def send_file(self, path: Path) -> None:
        """Send a file that has changed since the last upload. Remove a file that is no longer on the disk."""
        name = name_of(path.relative_to(self.run.directory))
        try:
            about = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            if self.marks.get(name) != ():
                self.bucket.remove([name])
                self.marks[name] = ()
            return
        mark = (about.st_mtime_ns, about.st_size, about.st_ino)
        if self.marks.get(name) == mark or not stat.S_ISREG(about.st_mode):
            return
        if about.st_size > AT_ONCE:
            self.bucket.send(path, name, digest(path))
        else:  # the file may grow during the upload
            self.bucket.write(name, read_plain(path, 2 * AT_ONCE))
        self.marks[name] = mark
