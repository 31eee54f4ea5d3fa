"""A run folder belongs to one process at a time."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from dicedist.runs.run import Run


@contextlib.contextmanager
def run_lock(run: Run) -> Iterator[None]:
    """Creates the folder if needed. The kernel releases the lock when the process ends, however it ends."""
    run.directory.mkdir(parents=True, exist_ok=True)
    with run.lock_file.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(1000).strip() or "another process"
            raise ValueError(f"{run} is in use by {owner}: wait for it, or choose another run.name") from error
        except OSError:
            pass  # some clusters' file systems do not support locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
