"""The pulse of every rank in the group's store: it shows which rank is missing, and lets all ranks end together.

A failed message shows which connection broke, not which rank failed. A message that waits for a hung rank shows
nothing. So a thread of each rank regularly writes a pulse: how much work this rank has done so far, and where its main
thread is. A group is hung if no rank has done any work for too long, compared with its longest piece of work so far. A
rank is lost if it has no pulse.
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
from dicedist.cluster.channel import Channel
from dicedist.cluster.process import MessageFailed

BEAT = 0.5  # seconds
MISSED = 4.0  # seconds to wait for pulses after a message has failed: a rank without a pulse is gone
ENDINGS = {"1", "2", "75"}  # codes with which one rank may end all ranks: a completed run never uses them
LEFT = "left"  # the last pulse of a rank that ended normally
WAITING = "waiting"  # the position of a rank that waits for others
PACKAGE = str(Path(__file__).parent.parent)
LONGER = 5  # a group is hung after this many times its longest piece of work (before the first, the timeout)
STARTING = 3600.0  # seconds that a piece of work may take before every rank has ended its first step: it may compile
NOT_YET = "~"  # marks the pulse of a rank that has not ended its first step
_messages = 0  # messages that the main thread waits for now
_work = 0  # pieces done by this process
_computing = 0  # nested long computations of the main thread
_starts = False  # a training is before the end of its first step


def advance() -> None:
    """Count a piece of work: a message, a batch of images, a file. Any thread may call this."""
    global _work
    _work += 1


def starts(first_step_is_due: bool) -> None:
    """Mark the first step: a training calls this with True before it, and with False after it."""
    global _starts
    _starts = first_step_is_due


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Wrap a long computation of the main thread on the CPU: processor time counts as work."""
    global _computing
    _computing += 1
    try:
        yield
    finally:
        _computing -= 1


@contextlib.contextmanager
def between_ranks() -> Iterator[None]:
    """Wrap every message of the main thread: pulses report that it waits, and a RuntimeError becomes MessageFailed."""
    global _messages
    _messages += 1
    try:
        yield
        advance()
    except RuntimeError as error:
        raise MessageFailed(str(error)) from error
    finally:
        _messages -= 1


class Heartbeat:
    """The thread that writes this rank's pulse and reads the others'.

    names: of the ranks, for error messages. host: of the store. end(message, code): ends this process; the heartbeat's
    thread calls it, with an empty message if another rank has reported the reason.
    """

    def __init__(
        self,
        store: dist.Store | Channel,
        rank: int,
        names: Sequence[str],
        host: str,
        timeout: float,
        end: Callable[[str, int], Any],
    ):
        self.store, self.rank, self.names, self.host, self.timeout, self.end = store, rank, names, host, timeout, end
        self.main = threading.get_ident()
        self.processor_time = 0.0  # of the main thread
        self.pulses = [""] * len(names)
        self.works = [""] * len(names)
        self.reset_clocks()
        self.longest = 0.0  # the longest time between two pieces of work, in seconds; 0 before the first piece
        self.answered = time.monotonic()  # when the store last answered
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self.live, name="heartbeat", daemon=True)
        self.thread.start()

    @property
    def own_name(self) -> str:
        return self.names[self.rank]

    def reset_clocks(self) -> None:
        self.seen = [time.monotonic()] * len(self.names)
        self.worked = time.monotonic()  # when any rank last did some work

    def live(self) -> None:
        count, last = 0, time.monotonic()
        try:
            while not self.leaving.wait(BEAT):
                if time.monotonic() - last > MISSED:  # this process was suspended itself, perhaps with the whole job
                    self.reset_clocks()
                count, last = count + 1, time.monotonic()
                self.note_computation()
                self.store.set(f"pulse/{self.rank}", f"{count} {NOT_YET * _starts}{_work} {position(self.main)}")
                self.look()
                self.answered = time.monotonic()
            self.store.set(f"pulse/{self.rank}", LEFT)
        except RuntimeError:  # the store is gone with its launcher, so no other process would stop or restart this run
            signals.ask()

    def note_computation(self) -> None:
        spent = processor_time(self.main)
        if _computing and not _messages and spent > self.processor_time:
            advance()
        self.processor_time = spent

    def look(self) -> None:
        if self.store.check(["ended"]) and (code := self.store.get("ended").decode()) in ENDINGS:
            self.end("", int(code))
        for rank, name in enumerate(self.names):
            pulse, now = self.pulse(rank), time.monotonic()
            if pulse != self.pulses[rank]:
                self.pulses[rank], self.seen[rank] = pulse, now
                self.note_work(rank, pulse, now)
            elif pulse != LEFT and now - self.seen[rank] > self.timeout:
                self.end(
                    f"{name} has given no sign of life for {self.timeout:.0f} s: stopped, or its machine is lost", 1
                )
        # A group whose pieces of work are long gets more time.
        starting = STARTING * any(work.startswith(NOT_YET) for work in self.works)
        if time.monotonic() - self.worked > max(self.timeout, LONGER * (self.longest or self.timeout), starting):
            self.end(self.hung() or "all ranks wait for each other", 1)

    def note_work(self, rank: int, pulse: str, now: float) -> None:
        work = pulse.split(" ")[1] if " " in pulse else pulse
        if work != self.works[rank]:
            if self.works[rank]:
                self.longest = max(self.longest, now - self.worked)
            self.works[rank], self.worked = work, now

    def gone(self) -> str | None:
        """Name the rank that has lost its pulse. The main thread calls this."""
        with between_ranks():  # this rank waits, it is not late
            time.sleep(MISSED)  # meanwhile the heartbeat ends this process if another rank reports the reason
        if not self.thread.is_alive():
            return "the launcher is gone"
        if time.monotonic() - self.answered > MISSED / 2:
            return f"no answer from {self.host}: the first node is lost, or the link to it is cut"
        here = [rank for rank, pulse in enumerate(self.pulses) if pulse != LEFT]
        silent = min(here, key=lambda rank: self.seen[rank])
        if time.monotonic() - self.seen[silent] < MISSED / 2:
            return None
        return f"{self.names[silent]} is gone: killed, or its machine is lost"

    def blame(self) -> str | None:
        """Name the rank that caused a failed message. The main thread calls this."""
        return self.gone() or self.hung()

    def hung(self) -> str | None:
        """Name the rank that the others wait for."""
        seconds = time.monotonic() - self.worked
        for name, pulse in zip(self.names, self.pulses, strict=True):
            where = pulse.rpartition(" ")[2]
            if pulse != LEFT and where and where != WAITING:
                return f"{name} has done no work for {seconds:.0f} s: it is in {where}"
        return None

    def leave(self) -> None:
        """Announce that this rank ends normally, so that the others continue."""
        self.leaving.set()
        self.thread.join(2 * BEAT)

    def outlast(self) -> None:
        """Wait for the other ranks, after `leave`, on the rank that serves the store: they still use the store."""
        deadline = time.monotonic() + MISSED
        while any(self.pulse(rank) != LEFT for rank in range(len(self.names))) and time.monotonic() < deadline:
            time.sleep(BEAT / 10)

    def pulse(self, rank: int) -> str:
        key = f"pulse/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""


def processor_time(thread: int) -> float:
    """Return the processor seconds of a thread, or of this process on systems that do not count threads."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.process_time()


def position(thread: int) -> str:
    """Return "waiting", or the function of this package that the thread is in."""
    if _messages:
        return WAITING
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "start"
