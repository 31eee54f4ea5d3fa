"""Signals that ask a run to stop.

They are SIGTERM (schedulers), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal, unless nohup
ignores it). If stopping at once would lose work, a signal only sets a flag, which the ranks read at the same step.
Otherwise a signal raises Stopped. A second signal ends the process at once.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EXIT_STOPPED = 75  # the exit code after a request to stop: the same command resumes the run
SAME_REQUEST = 2.0  # seconds in which a scheduler's signal to all processes and a launcher's copies are one request

_asked = False
_deferred = False


class Stopped(BaseException):
    """This process was asked to stop. Not an Exception, so that no handler mistakes it for an error."""


def listen() -> None:
    """Install the handlers. Call once, from the main thread."""
    numbers, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)
    threading.Thread(target=end_at_the_second, args=(numbers,), name="signals", daemon=True).start()
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, receive)


def receive(number: int, frame: FrameType | None) -> None:
    first = not _asked
    ask()
    if first and not _deferred:
        raise Stopped


def end_at_the_second(numbers: socket.socket) -> None:
    """End at the second signal. Runs in a thread, because Python's handlers cannot run while torch waits for a rank."""
    first = None
    while number := numbers.recv(1):
        now = time.monotonic()
        if number[0] in ASKING:
            first = first or now
            if now - first > SAME_REQUEST:
                os._exit(EXIT_STOPPED)


def ask() -> None:
    global _asked
    _asked = True


def asked() -> bool:
    return _asked


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a signal only set the flag that asked() reads, inside the context; permanently after an exception.

    A launcher that sees a rank fail sends signals to the others, which are then reporting their own failures.
    """
    global _deferred
    before, _deferred = _deferred, True
    yield
    _deferred = before


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise Stopped inside the context, even a signal that arrived earlier.

    Send messages between ranks in this context only if the run ends anyway when one of them is missing.
    """
    global _deferred
    before, _deferred = _deferred, False
    try:
        if _asked:
            raise Stopped
        yield
    finally:
        _deferred = before
