"""A key-value store for the ranks of one node, served by their launcher over a Unix socket.

torch's TCPStore answers every user of the machine, lists all keys and lets everybody overwrite them. For a Unix socket
the kernel reports the user at the other end, so here both ends refuse other users. The name of the socket is in Linux's
abstract namespace: there is no file to remove, and a full disk does no harm. torch itself still uses a TCPStore for the
addresses of its ranks.
"""

import contextlib
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

CHANNEL = "DICEDIST_CHANNEL"  # the name of the socket, for the ranks
LARGEST = 2**26  # bytes of a message
MOMENT = 0.01  # seconds between two polls for a key


class Keeper:
    """The server in the launcher; it answers each connection in its own thread."""

    def __init__(self) -> None:
        self.name, self.values, self.lock = f"dicedist-{uuid.uuid4().hex}", dict[str, str](), threading.Lock()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen(1024)
        threading.Thread(target=self.live, name="keeper", daemon=True).start()

    def live(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self.listener.accept()
                if is_own_user(link):
                    threading.Thread(target=self.serve, args=[Connection(link.detach())], daemon=True).start()
                else:
                    link.close()

    def serve(self, link: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), link:
            while True:
                question, *words = json.loads(link.recv_bytes(LARGEST))
                link.send_bytes(json.dumps(self.answer(question, *words)).encode())

    def answer(self, question: str, key: str, value: Any = None) -> Any:
        with self.lock:
            match question:
                case "set":
                    self.values[key] = value
                case "add":
                    self.values[key] = str(int(self.values.get(key, "0")) + value)
                case "delete":
                    return self.values.pop(key, None)
            return self.values.get(key)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Channel:
    """A rank's connection, with the methods and the RuntimeErrors of torch's stores."""

    def __init__(self, name: str, prefix: str, timeout: float):
        self.name, self.prefix, self.timeout, self.lock = name, prefix, timeout, threading.Lock()
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(f"\0{name}")
        except OSError as error:
            raise RuntimeError("the launcher is gone") from error
        if not is_own_user(link):
            raise RuntimeError("the launcher belongs to another user")
        self.link = Connection(link.detach())

    def ask(self, question: str, key: str, *words: Any) -> Any:
        with self.lock:
            try:
                self.link.send_bytes(json.dumps([question, f"{self.prefix}/{key}", *words]).encode())
                return json.loads(self.link.recv_bytes(LARGEST))
            except (EOFError, OSError) as error:
                raise RuntimeError("the launcher is gone") from error

    def set(self, key: str, value: str | bytes) -> None:
        self.ask("set", key, value if isinstance(value, str) else value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value."""
        deadline = time.monotonic() + self.timeout
        while (value := self.ask("get", key)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key} was not there within {self.timeout:.0f} s")
            time.sleep(MOMENT)
        return str(value).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.ask("get", key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self.ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        return self.ask("delete", key) is not None

    def clone(self) -> "Channel":
        return Channel(self.name, self.prefix, self.timeout)


def is_own_user(link: socket.socket) -> bool:
    """Ask the kernel for the user at the other end."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.geteuid()
