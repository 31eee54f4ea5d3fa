"""Locks between processes, by filelock. A lock ends with its process, even after a crash."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from dicedist.runs.files import open_own, read_plain

if TYPE_CHECKING:
    from dicedist.runs.run import Run

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # errors of a file system without locks
MOMENT = 1.0  # seconds in which filelock removes the file of a process that has ended


def run_lock(run: "Run") -> contextlib.AbstractContextManager[None]:
    """Let only one process write to the folder of a run. Create the folder if needed."""
    run.directory.mkdir(parents=True, exist_ok=True)
    return locked(run.lock_file, f"{run} is in use", "choose another run.name")


@contextlib.contextmanager
def locked(path: Path, busy: str | None = None, instead: str = "start again then") -> Iterator[None]:
    """Hold the lock at this path. If another process holds it, wait, or raise a ValueError that begins with `busy`.

    On a file system without locks, a file with the suffix .owner replaces the lock.
    """
    open_own(path, "a").close()  # refuses a link
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0 if busy else -1)
            with contextlib.suppress(OSError):  # a full disk; only messages use the owner
                path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")  # the format of filelock's own file
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            lock, instead = SoftFileLock(f"{path}.owner"), f"if it has surely ended, delete {path}.owner"
            lock.acquire(timeout=MOMENT if busy else -1)
    except Timeout as error:
        raise ValueError(f"{busy} by {owner_in(Path(error.lock_file))}: wait for it, or {instead}") from error
    try:
        yield
    finally:
        lock.release()


def owner_in(path: Path) -> str:
    try:
        pid, host, *_ = read_plain(path, 1000).decode().split()
    except (OSError, ValueError):
        return "another process"
    return f"process {pid} on {host}"
