"""A bucket belongs to one training at a time: a lease, which its owner renews and a dead owner does not.

    .lease-00000003     {"owner": "process 12 on node-a", "mark": ..., "beat": 41, ...}

Nobody compares clocks. The owner writes another number every few seconds; who finds a lease watches it, by a clock of
its own that never jumps, and a lease that stays the same for TERM seconds belongs to nobody. To take it over means to
create the file of the next number, which only one can. The owner of a lower number has lost it, and sends no more.
"""

import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from dicedist.cluster.heartbeat import advance
from dicedist.runs.bucket import Bucket, Unreachable
from dicedist.runs.files import dump_checked, load_checked

TERM, BEAT, LOOK = 60.0, 10.0, 1.0  # seconds: until a silent owner counts as dead, between its signs of life, looks
PREFIX, LARGEST = ".lease-", 10_000
GOODBYE = 5.0  # seconds that a bucket has to let go


class Lost(Unreachable):
    """Another training has taken the bucket over."""


class Lease:
    def __init__(self, bucket: Bucket):
        self.bucket, self.number, self.beats, self.lost = bucket, 0, 0, False
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        self.about = {"owner": owner, "pid": os.getpid(), "mark": uuid.uuid4().hex, "machine": this_machine()}
        self.leaving = threading.Event()
        self.renewing = threading.Thread(target=self.renew, name="lease", daemon=True)

    @property
    def held(self) -> bool:
        return self.number > 0

    def take(self) -> None:
        """ValueError if a training that is alive has it; waits for up to TERM seconds to find that out."""
        first: tuple[int, dict[str, Any]] | None = None
        began = time.monotonic()
        while True:
            number, found = self.newest()
            if not number or ended(found) or (first is not None and time.monotonic() - began > TERM):
                if self.create(number + 1):
                    return
            elif first is None:
                first = number, found
            elif (number, found) != first:
                raise ValueError(
                    f"{self.bucket} is in use by {found.get('owner', 'another training')}: wait for it, or choose "
                    "another run.name"
                )
            advance()
            time.sleep(LOOK)

    def create(self, number: int) -> bool:
        if not self.bucket.create(name_of(number), self.text()):
            return False
        if self.newest()[1].get("mark") != self.about["mark"]:
            return False  # not every store refuses the second of two at once: then the last one's word stands
        self.number = number
        self.renewing.start()
        self.bucket.remove([name_of(older) for older in self.numbers() if older < number])
        return True

    def renew(self) -> None:
        while not self.leaving.wait(BEAT):
            self.beats += 1
            try:
                self.confirm()
                self.bucket.put(name_of(self.number), self.text())
            except Lost:
                return
            except (OSError, ValueError):  # at the next beat
                continue

    def confirm(self) -> None:
        """Lost if it belongs to another by now."""
        number, found = self.newest()
        if number > self.number or (number == self.number and found.get("mark") not in (None, self.about["mark"])):
            self.lost = True
            raise Lost(f"{self.bucket} was taken over by {found.get('owner', 'another training')}")

    def release(self) -> None:
        """In a thread, because a bucket may never answer."""
        self.leaving.set()
        if self.held:
            leaving = threading.Thread(target=self.remove, daemon=True)
            leaving.start()
            leaving.join(GOODBYE)

    def remove(self) -> None:
        self.renewing.join()  # which could write it again
        try:
            self.confirm()
            self.bucket.remove([name_of(self.number)])
        except (OSError, ValueError):
            pass  # then it runs out

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Its number, 0 if there is none, and what it says, nothing if it is damaged."""
        number = max(self.numbers(), default=0)
        try:
            return number, load_checked(self.bucket.read(name_of(number), LARGEST) or b"") if number else {}
        except (ValueError, RecursionError):
            return number, {}

    def numbers(self) -> list[int]:
        names = [name.removeprefix(PREFIX) for name in self.bucket.listed() if name.startswith(PREFIX)]
        return [int(name) for name in names if name.isdecimal()]

    def text(self) -> bytes:
        return dump_checked({**self.about, "beat": self.beats}).encode()


def name_of(number: int) -> str:
    return f"{PREFIX}{number:08d}"


def this_machine() -> str:
    """The same for processes that see each other by their numbers: one boot of one kernel, one space of numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def ended(found: dict[str, Any]) -> bool:
    """Return whether the owner was a process of this machine and has ended: then nobody need wait."""
    here = this_machine() and found.get("machine") == this_machine()
    return bool(here) and isinstance(found.get("pid"), int) and not psutil.pid_exists(found["pid"])
