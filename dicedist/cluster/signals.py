"""Signals that ask a run to stop: SIGTERM (schedulers), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning).

Where stopping at once would lose work, a signal only sets a flag, which the ranks read at the same step; elsewhere it
raises Stopped. A second signal ends the process, whatever it does.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST = 2.0  # seconds: a scheduler that signals all processes and a launcher that forwards it are one request

_asked = False
_deferred = False


class Stopped(BaseException):
    """This process was asked to stop; not an Exception, so that nothing on the way takes it for an error."""


def listen() -> None:
    """From the main thread, once."""
    numbers, heard = socket.socketpair()
    heard.setblocking(False)
    signal.set_wakeup_fd(heard.detach(), warn_on_full_buffer=False)
    threading.Thread(target=end_at_the_second, args=(numbers,), name="signals", daemon=True).start()
    for number in ASKING:
        signal.signal(number, receive)


def receive(number: int, frame: FrameType | None) -> None:
    first = not _asked
    ask()
    if first and not _deferred:
        raise Stopped


def end_at_the_second(numbers: socket.socket) -> None:
    """In a thread: Python's handlers do not run while the main thread waits inside torch for a rank that is gone."""
    first = None
    while number := numbers.recv(1):
        now = time.monotonic()
        if number[0] in ASKING:
            first = first or now
            if now - first > SAME_REQUEST:
                os._exit(128 + number[0])


def ask() -> None:
    global _asked
    _asked = True


def asked() -> bool:
    return _asked


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, and ever after if it ends in an exception, a signal waits until asked() is read.

    A launcher that sees a rank fail sends a signal to the others, which then are busy telling why they failed too.
    """
    global _deferred
    before, _deferred = _deferred, True
    yield
    _deferred = before


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a signal raises Stopped, also one that came before.

    Messages between ranks belong in here only where the run ends if one of them fails to be sent.
    """
    global _deferred
    before, _deferred = _deferred, False
    try:
        if _asked:
            raise Stopped
        yield
    finally:
        _deferred = before
