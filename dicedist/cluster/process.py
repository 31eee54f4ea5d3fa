"""A process of dicedist: its rank, and its end. An error is reported once, in one line, by one rank.

Exit codes: 0 done, 1 a fault (a launcher may restart the run), 2 refused or failed for a reason that a restart does not
fix, 75 stopped on request (the same command resumes the run), 76 complete, but not everything reached MLflow or the
bucket.

torch is not imported here: help and refusals do not need it.
"""

import contextlib
import ctypes
import io
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dicedist.cluster import signals
from dicedist.console.lines import printable, put, redacted

if TYPE_CHECKING:
    from dicedist.cluster.world import Joined

EXIT_FAULT, EXIT_USER, EXIT_STOPPED, EXIT_UNSENT = 1, 2, signals.EXIT_STOPPED, 76
LAUNCHER = "DICEDIST_LAUNCHER"  # the folder in which `dicedist.launch` expects the exit code of each of its ranks
SECRET = "DICEDIST_SECRET"  # the prefix of all keys that ranks of several nodes write to the store: separates runs
ATTEMPT = "DICEDIST_ATTEMPT"  # the number of the rendezvous; torchrun's own count may differ between nodes
STORE_PATIENCE = 5.0  # seconds
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
STDOUT = 1
_leaving = threading.Lock()


class EndedElsewhere(Exception):
    """Another rank reports the reason; this rank only ends."""


class Unsent(Exception):
    """The run is complete, but not everything reached MLflow or the bucket."""


class MessageFailed(RuntimeError):
    """A message between ranks failed; the rank that notices is rarely the cause."""


group: "Joined | None" = None  # set while this process is a rank of a group


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def attempt() -> int:
    """Return how often this launch has started its ranks before."""
    return int(os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def under_agent() -> bool:
    """Return whether torchrun's agent serves the store, which then outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def command(run: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run an entry point: an error gives one line from one rank and an exit code; DICEDIST_DEBUG=1 adds tracebacks."""
    signals.listen()
    # A process whose streams are closed still has work to do.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack some characters
    if this_rank() > 0:
        logging.disable(logging.WARNING)  # rank 0 alone logs what all ranks notice
    try:
        run(sys.argv[1:])
    except (Exception, signals.Stopped) as error:
        with signals.deferred():
            end(*explained(error))
    exit_process(0)


def tune_malloc() -> None:
    """Stop glibc from returning the memory of activations to the system after each step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that it accepts
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def nobody_reads() -> bool:
    """Return whether the reader of the output has left, as after `| head`."""
    printed = select.poll()
    printed.register(STDOUT, 0)  # 0: only errors
    return bool(printed.poll(0))


def explained(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, EndedElsewhere) or (isinstance(error, BrokenPipeError) and nobody_reads()):
        return "", EXIT_USER
    if isinstance(error, ValueError | OSError):
        return one_line(error), EXIT_USER
    if isinstance(error, Unsent):
        return one_line(error), EXIT_UNSENT
    if too_small := out_of_memory(error):
        return f"{own_prefix()}{too_small}", EXIT_USER
    if isinstance(error, signals.Stopped):
        # If the ranks did not agree to stop, a launcher may be ending the remaining ranks after one was lost.
        gone = group.heartbeat.gone() if group and not error.args else None
        return (gone, EXIT_FAULT) if gone else (str(error) or "stopped on request", EXIT_STOPPED)
    if group and isinstance(error, MessageFailed) and (blamed := group.heartbeat.blame()):
        return blamed, EXIT_FAULT
    return f"{own_prefix()}{type(error).__name__}: {one_line(error)} (DICEDIST_DEBUG=1 shows where)", EXIT_FAULT


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for a GPU that ran out of memory; None for any other error."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return None
    from dicedist.cluster.devices import too_small

    return too_small(torch.device("cuda", torch.cuda.current_device()))


def own_prefix() -> str:
    """Return the start of a message about this rank."""
    return f"{group.heartbeat.own_name}: " if group else ""


def one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()))


def end(message: str, code: int) -> NoReturn:
    """Report the reason and end, unless another rank has reported: only the first failure is shown."""
    if os.environ.get("DICEDIST_DEBUG") == "1" and sys.exception():
        put(sys.stderr, traceback.format_exc())
    if message and is_first_to_end(code):
        put(sys.stderr, f"dicedist: {message}{remark_on_torchrun(code)}\n")
        pass_to_torchrun(redacted(message))
    exit_process(code)


def under_plain_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ


def remark_on_torchrun(code: int) -> str:
    """Return a remark about the traceback that plain torchrun prints after a signal."""
    if code != EXIT_STOPPED or not under_plain_torchrun():
        return ""
    return f" (a traceback of torchrun may follow; `dicedist train --nproc {world_size()}` ends without, with {code})"


def pass_to_torchrun(message: str) -> None:
    """Write the message to torchrun's error file: plain torchrun quotes it at the end of its long banner."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and under_plain_torchrun():
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": about}))


def is_first_to_end(code: int) -> bool:
    """Return whether this rank is the first to report why the group ends; the others then end with the same code."""
    answers: list[bool] = []
    # A signal may have interrupted the import of torch, which cannot be imported a second time.
    if group or (under_agent() and (code != EXIT_STOPPED or "dicedist.cluster.world" in sys.modules)):
        from dicedist.cluster.world import is_first_in_store

        # In a thread, because a store behind a cut link never answers.
        asking = threading.Thread(target=lambda: answers.append(is_first_in_store(code)), daemon=True)
        asking.start()
        asking.join(STORE_PATIENCE)
    return answers[0] if answers else os.environ.get("LOCAL_RANK", "0") == "0"


def exit_process(code: int) -> NoReturn:
    """End without the interpreter's clean-up: threads of a broken group could block it."""
    _leaving.acquire()  # never released: the main thread and the heartbeat may both call this, and the first ends both
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if LAUNCHER in os.environ and left_for_launcher(code) and code in (EXIT_USER, EXIT_STOPPED, EXIT_UNSENT):
        code = 0  # torchrun's agent treats any other code as a fault, and restarts
    os._exit(code)


def left_for_launcher(code: int) -> bool:
    """Write the exit code for the launcher. Return whether that worked: without it a failed run would look complete."""
    folder = Path(os.environ[LAUNCHER])
    try:
        folder.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary folders may have removed it
        (folder / os.environ["LOCAL_RANK"]).write_text(str(code))
    except OSError:
        return False
    return True
