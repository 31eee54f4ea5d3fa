"""The lease of a bucket, which one training holds at a time. filelock can only lock files on a disk.

    .lease-00000003     {"owner": "process 12 on node-a", "mark": ..., "beat": 41, ...}

The owner writes a new beat every few seconds. A training that finds a lease watches it by its own clock. A lease that
does not change for TERM seconds has expired. To take it over, a training creates the file of the next number, which
only one training can. The owner of a lower number has lost the bucket, and stops sending.
"""

import contextlib
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

TERM, BEAT, LOOK = 60.0, 10.0, 1.0  # seconds: expiry of a lease, interval of beats, of reads
PREFIX, LARGEST = ".lease-", 10_000
GOODBYE = 5.0  # seconds to wait for the release


class Lost(Unreachable):
    """Loss of the lease: another training has taken the bucket over."""


class Lease:
    def __init__(self, bucket: Bucket):
        self.bucket, self.number, self.beats, self.lost = bucket, 0, 0, False
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        self.about = {"owner": owner, "pid": os.getpid(), "mark": uuid.uuid4().hex, "machine": this_machine()}
        self.leaving = threading.Event()
        self.renewing: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self.number > 0

    def take(self) -> None:
        """Take the lease; ValueError if another training renews it within TERM seconds."""
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
            return False  # some stores accept both of two concurrent writes: the last one wins
        self.number = number
        self.renewing = threading.Thread(target=self.renew, name="lease", daemon=True)
        self.renewing.start()
        self.bucket.remove([name_of(older) for older in self.numbers() if older < number])
        return True

    def renew(self) -> None:
        """Write beats until this training leaves or has lost the lease. Then remove the lease, or let it expire."""
        leaving = False
        while not (leaving or self.lost):
            leaving = self.leaving.wait(BEAT)
            self.beats += 1
            with contextlib.suppress(OSError, ValueError):
                self.confirm()
                if leaving:
                    self.bucket.remove([name_of(self.number)])
                else:
                    self.bucket.put(name_of(self.number), self.text())

    def confirm(self) -> None:
        """Raise Lost if another training holds the lease."""
        number, found = self.newest()
        if number > self.number or (number == self.number and found.get("mark") not in (None, self.about["mark"])):
            self.lost = True
            raise Lost(f"{self.bucket} was taken over by {found.get('owner', 'another training')}")

    def release(self) -> None:
        """Release the lease. Wait at most GOODBYE seconds for the bucket."""
        self.leaving.set()
        if self.renewing is not None:
            self.renewing.join(GOODBYE)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the newest lease (0: there is none) and its values (empty if damaged)."""
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
    """Return the ids of the boot and of the process namespace, within which a process id is unique."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def ended(found: dict[str, Any]) -> bool:
    """Return whether the owner was a process of this machine that has ended. Then the lease need not expire first."""
    here = this_machine() and found.get("machine") == this_machine()
    return bool(here) and isinstance(found.get("pid"), int) and not psutil.pid_exists(found["pid"])
