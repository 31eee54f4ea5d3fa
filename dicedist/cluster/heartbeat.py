"""The pulse of every rank, in the store of the group: it shows who is missing, and lets all ranks end together.

A failed message tells which connection broke, not which rank did, and a message that waits for a hung rank tells
nothing until it times out. So a thread of each rank regularly writes a pulse that says where its main thread is.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dicedist.cluster import signals
from dicedist.cluster.process import MessageFailed

BEAT = 0.5  # seconds
MISSED = 4.0  # seconds to wait for pulses once a message has failed: a rank without any is gone
LEFT = "left"  # the last pulse of a rank that ended normally
WAITING = "waiting"  # the position of a rank that waits for others
PACKAGE = str(Path(__file__).parent.parent)
_messages = 0  # how many the main thread is in the middle of


@contextlib.contextmanager
def between_ranks() -> Iterator[None]:
    """Wraps every message of the main thread: pulses say that it waits, and a RuntimeError becomes MessageFailed."""
    global _messages
    _messages += 1
    try:
        yield
    except RuntimeError as error:
        raise MessageFailed(str(error)) from error
    finally:
        _messages -= 1


class Heartbeat:
    """names: of the ranks, for error messages; host: of the store. end(message, code): ends this process, called in
    the heartbeat's thread; the message is empty if another rank has reported the reason."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        names: Sequence[str],
        host: str,
        timeout: float,
        end: Callable[[str, int], Any],
    ):
        self.store, self.rank, self.names, self.host, self.timeout, self.end = store, rank, names, host, timeout, end
        self.main = threading.get_ident()
        self.pulses = [""] * len(names)
        self.seen = [time.monotonic()] * len(names)
        self.heard = time.monotonic()  # when the store last answered
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self.live, name="heartbeat", daemon=True)
        self.thread.start()

    def live(self) -> None:
        count = 0
        try:
            while not self.leaving.wait(BEAT):
                count += 1
                self.store.set(f"pulse/{self.rank}", f"{count} {position(self.main)}")
                self.look()
                self.heard = time.monotonic()
            self.store.set(f"pulse/{self.rank}", LEFT)
        except RuntimeError:  # the store is gone with its launcher, so nobody else would stop or restart this run
            signals.ask()

    def look(self) -> None:
        if self.store.check(["ended"]):
            self.end("", int(self.store.get("ended")))
        for rank, name in enumerate(self.names):
            key = f"pulse/{rank}"
            pulse = self.store.get(key).decode() if self.store.check([key]) else ""
            if pulse != self.pulses[rank]:
                self.pulses[rank], self.seen[rank] = pulse, time.monotonic()
            elif pulse != LEFT and time.monotonic() - self.seen[rank] > self.timeout:
                self.end(
                    f"{name} has given no sign of life for {self.timeout:.0f} s: stopped, or its machine is lost", 1
                )

    def gone(self) -> str | None:
        """Called in the main thread: who has no pulse any more, in words."""
        with between_ranks():  # so that this rank counts as waiting, not as late
            time.sleep(MISSED)  # meanwhile the heartbeat ends this process if another rank reports the reason
        if not self.thread.is_alive():
            return "the launcher is gone"
        if time.monotonic() - self.heard > MISSED / 2:
            return f"no answer from {self.host} any more: the first node is lost, or the link to it is cut"
        here = [rank for rank, pulse in enumerate(self.pulses) if pulse != LEFT]
        silent = min(here, key=lambda rank: self.seen[rank])
        if time.monotonic() - self.seen[silent] < MISSED / 2:
            return None
        return f"{self.names[silent]} is gone: killed, or its machine is lost"

    def blame(self) -> str | None:
        """Called in the main thread after a message failed: who did not do its part; None if nobody can be named."""
        if gone := self.gone():
            return gone
        for name, pulse in zip(self.names, self.pulses, strict=True):
            where = pulse.partition(" ")[2]
            if where and where != WAITING:
                return f"{name} did not answer within {self.timeout:.0f} s: it is in {where}"
        return None

    def leave(self) -> None:
        """Announce that this rank ends normally; the others need not end."""
        self.leaving.set()
        self.thread.join(2 * BEAT)

    def outlast(self) -> None:
        """Called after `leave` on the rank that keeps the store: wait for the others, which still use it."""
        deadline = time.monotonic() + MISSED
        while not all(self.has_left(rank) for rank in range(len(self.names))) and time.monotonic() < deadline:
            time.sleep(BEAT / 10)

    def has_left(self, rank: int) -> bool:
        key = f"pulse/{rank}"
        return self.store.check([key]) and self.store.get(key).decode() == LEFT


def position(thread: int) -> str:
    """What the thread is doing: waiting for others, or the innermost function of this package that it is in."""
    if _messages:
        return WAITING
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "start"
