"""A run folder belongs to one process at a time."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator

from dicedist.runs.files import open_own
from dicedist.runs.run import Run

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # what a file system without locks answers


@contextlib.contextmanager
def run_lock(run: Run) -> Iterator[None]:
    """Creates the folder if needed. The kernel releases the lock when the process ends, however it ends."""
    run.directory.mkdir(parents=True, exist_ok=True)
    with open_own(run.lock_file, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(1000).strip() or "another process"
            raise ValueError(f"{run} is in use by {owner}: wait for it, or choose another run.name") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            with owned_by_name(run):
                yield
            return
        file.truncate(0)
        file.write(f"{this_process()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def owned_by_name(run: Run) -> Iterator[None]:
    """Where the file system has no locks: a file that only one process can create, removed at the end."""
    path, flags = run.owner_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        descriptor = os.open(path, flags)
    except FileExistsError as error:
        owner = (path.read_text()[:1000].strip() if path.is_file() else "") or "another process"
        if not ended_here(owner):
            advice = f"wait for it, or if it has surely ended, delete {path}"
            raise ValueError(f"{run} is in use by {owner}: {advice}") from error
        path.unlink()
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "w") as file:
        file.write(this_process())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def ended_here(owner: str) -> bool:
    """Whether the owner was a process of this machine, and has ended."""
    words = owner.split()
    if len(words) != 4 or words[3] != socket.gethostname() or not words[1].isdecimal():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
