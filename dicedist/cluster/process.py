"""A process of dicedist: which rank it is, and how it ends. An error is told once, in one line, by one rank.

Exit codes: 0 done, 1 a fault (a launcher may start the run again), 2 refused or failed for a reason that a restart does
not mend, 75 stopped on request (the same command continues).

torch is not imported here: help and refusals come before it is needed.
"""

import contextlib
import ctypes
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from dicedist.cluster import signals

EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 1, 2, 75
LAUNCHER = "DICEDIST_LAUNCHER"  # the folder in which `dicedist.launch` expects the exit code of each of its ranks
STORE_PATIENCE = 5.0  # seconds
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
_leaving = threading.Lock()


class EndedElsewhere(Exception):
    """Another rank tells why; this one only ends."""


class MessageFailed(RuntimeError):
    """A message between ranks did not come through, which is rarely the fault of the rank that notices."""


class Group(Protocol):
    """What a rank can ask of its group when something goes wrong; dicedist.cluster.world has it."""

    @property
    def own_name(self) -> str: ...

    def gone(self) -> str | None:
        """Who has no pulse any more, in words."""

    def blame(self) -> str | None:
        """Who did not do its part, in words."""

    def is_first_to_end(self, code: int) -> bool:
        """Whether no other rank has told why the group ends; if so, the others end with the same code."""


group: Group | None = None  # while this process is a rank of one


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def under_agent() -> bool:
    """Whether torchrun's agent keeps the store, which then outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def command(run: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run an entry point: an error is one line from one rank and an exit code; DICEDIST_DEBUG=1 adds tracebacks."""
    signals.listen()
    if this_rank() > 0:
        logging.disable(logging.WARNING)  # what all ranks notice, one of them tells
    try:
        run(sys.argv[1:])
    except (Exception, signals.Stopped) as error:
        with signals.deferred():
            end(*explained(error))
    exit_process(0)


def tune_malloc() -> None:
    """Activations live in memory that glibc would return to the system and fetch anew, a page at a time, every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def explained(error: BaseException) -> tuple[str, int]:
    """What to say, and the exit code."""
    if isinstance(error, EndedElsewhere):
        return "", EXIT_USER
    if isinstance(error, ValueError | OSError):
        return one_line(error), EXIT_USER
    if too_small := out_of_memory(error):
        return f"{own_prefix()}{too_small}", EXIT_USER
    if isinstance(error, signals.Stopped):
        # If not all ranks agreed on it, it may be a launcher that ends what the loss of a rank has left.
        gone = group.gone() if group and not error.args else None
        return (gone, EXIT_FAULT) if gone else (str(error) or "stopped on request", EXIT_STOPPED)
    if group and isinstance(error, MessageFailed) and (blamed := group.blame()):
        return blamed, EXIT_FAULT
    return f"{own_prefix()}{type(error).__name__}: {one_line(error)} (DICEDIST_DEBUG=1 shows where)", EXIT_FAULT


def out_of_memory(error: BaseException) -> str | None:
    """What to say of a GPU whose memory did not suffice; None if that is not what happened."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return None
    from dicedist.cluster.devices import too_small

    return too_small(torch.device("cuda", torch.cuda.current_device()))


def own_prefix() -> str:
    """The beginning of a line that is about this rank."""
    return f"{group.own_name}: " if group else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def end(message: str, code: int) -> NoReturn:
    """Tell why, unless another rank has: what follows from its failure stays unsaid."""
    if os.environ.get("DICEDIST_DEBUG") == "1" and sys.exception():
        traceback.print_exc()
    if message and is_first_to_end(code):
        print(f"dicedist: {message}", file=sys.stderr, flush=True)
    exit_process(code)


def is_first_to_end(code: int) -> bool:
    answers: list[bool] = []
    # In a thread, because a store behind a cut link answers neither yes nor no.
    asking = threading.Thread(target=lambda: answers.append(ask_group(code)), daemon=True)
    asking.start()
    asking.join(STORE_PATIENCE)
    return answers[0] if answers else os.environ.get("LOCAL_RANK", "0") == "0"


def ask_group(code: int) -> bool:
    """A rank that fails before it has joined its group asks in the store that the agent keeps for it."""
    if group is not None:
        return group.is_first_to_end(code)
    if under_agent():
        from dicedist.cluster.world import is_first_in_store

        return is_first_in_store(None, code)
    return os.environ.get("LOCAL_RANK", "0") == "0"


def exit_process(code: int) -> NoReturn:
    """End without the interpreter's clean-up: threads of a broken group could hold it up."""
    _leaving.acquire()  # for ever: the main thread and the heartbeat may come here together, and the first ends both
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if LAUNCHER in os.environ:
        (Path(os.environ[LAUNCHER]) / os.environ["LOCAL_RANK"]).write_text(str(code))
        if code in (EXIT_USER, EXIT_STOPPED):
            code = 0  # to torchrun's agent everything else is a fault, to be restarted
    os._exit(code)
