"""A run's folder in a bucket, or wherever else fsspec writes: s3://, gs://, file://. Files are named as in run.py.

What was written counts as there when it was read again and is the same: a store that cuts, changes or drops what it is
given is noticed while the disk still has it. Credentials are the library's business, and come from where it looks.
"""

import contextlib
import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from dicedist.cluster.heartbeat import advance
from dicedist.config import Config
from dicedist.console.lines import redacted
from dicedist.data.remote import CHUNK, open_url, reason_of, state_in

OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}}  # of others: no listing is remembered
FRESH = {"use_listings_cache": False}
PATIENCE, PAUSE = 30.0, 2.0  # seconds


class Unreachable(OSError):
    """The bucket did not do what it was asked; the message is one line without secrets."""


@dataclass(frozen=True)
class Bucket:
    url: str
    files: Any  # fsspec's file system
    path: str

    @classmethod
    def at(cls, url: str, what: str) -> Self:
        """what: names it, for the messages, as in run.remote=s3://..."""
        url = url.rstrip("/")
        options = OPTIONS.get(url.partition("://")[0], FRESH)
        return cls(url, *open_url(url, redacted(what), **options))

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """Where the run of a training is kept beside its disk; None if nowhere."""
        remote = config.run.remote
        return cls.at(f"{remote.rstrip('/')}/{config.run.name}", f"run.remote={remote}") if remote else None

    def __str__(self) -> str:
        return redacted(self.url)

    def inside(self, name: str) -> "Bucket":
        return Bucket(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    def listed(self) -> dict[str, list[Any]]:
        """Every file below, by its name from here: its size, and what changes when it is replaced."""
        with self.asked():
            found = self.files.find(self.path, detail=True)
        root = PurePosixPath(self.path)
        return {str(PurePosixPath(path).relative_to(root)): state_in(info) for path, info in found.items()}

    def holding(self, name: str) -> list["Bucket"]:
        """This one if it has a file of this name, else those folders in it that have one; itself if there are none."""
        try:
            found = self.listed()
        except FileNotFoundError as error:
            raise ValueError(f"{self} cannot be read: {reason_of(error)}") from error
        below = [self.inside(folder) for folder, _, file in (path.partition("/") for path in found) if file == name]
        return below if below and name not in found else [self]

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a file of at most so many bytes; None if there is no such file."""
        with self.asked(), contextlib.suppress(FileNotFoundError):
            if int(self.files.info(f"{self.path}/{name}")["size"] or 0) > limit:
                raise ValueError(f"{self}/{name} has more than the {limit:,} bytes that it may have")
            return bytes(self.files.cat_file(f"{self.path}/{name}"))
        return None

    def take(self, name: str, path: Path, size: int) -> str:
        """Copies a file of this size to the disk; its sha256."""
        sha256, left = hashlib.sha256(), size
        with self.asked(), self.open(name) as file, path.open("wb") as target:
            while left and (piece := file.read(min(CHUNK, left))):
                target.write(piece)
                sha256.update(piece)
                left -= len(piece)
                advance()
        if left:
            raise ValueError(f"{self}/{name} ends {left:,} bytes before its {size:,}")
        return sha256.hexdigest()

    def write(self, name: str, content: bytes) -> None:
        """Writes under another name first: what was there before stays until what replaces it has arrived whole."""
        draft = f"{name}.partial"
        self.put(draft, content)
        self.compare(draft, hashlib.sha256(content).hexdigest())
        with self.asked():
            self.files.cp_file(f"{self.path}/{draft}", f"{self.path}/{name}")
        self.remove([draft])

    def put(self, name: str, content: bytes) -> None:
        with self.asked():
            self.files.pipe_file(f"{self.path}/{name}", content)

    def send(self, path: Path, name: str, sha256: str) -> None:
        """A file that does not change while it is sent."""
        with self.asked():
            self.files.put_file(str(path), f"{self.path}/{name}")
        self.compare(name, sha256)

    def create(self, name: str, content: bytes) -> bool:
        """Whether this call has made the file: of several at once, only one does."""
        with self.asked():
            try:
                with self.files.open(f"{self.path}/{name}", "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        """One after another, in this order; what is not there need not be removed."""
        for name in names:
            with self.asked(), contextlib.suppress(FileNotFoundError):
                self.files.rm_file(f"{self.path}/{name}")

    def compare(self, name: str, sha256: str) -> None:
        found = hashlib.sha256()
        with self.asked(), self.open(name) as file:
            while piece := file.read(CHUNK):
                found.update(piece)
        if found.hexdigest() != sha256:
            raise Unreachable(f"{self}/{name} came back other than it was sent")

    def open(self, name: str) -> Any:
        return self.files.open(f"{self.path}/{name}", "rb", cache_type="none")

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Turns what the libraries raise, which have errors of their own, into one kind."""
        try:
            yield
        except (Unreachable, FileNotFoundError, ValueError):
            raise
        except Exception as error:
            raise Unreachable(f"{self}: {reason_of(error)}") from error

    def refuse_unwritable(self, what: str) -> None:
        """Before anything that takes minutes: the bucket must exist and let us write. It has a moment to come back."""
        probe, deadline = f".probe-{uuid.uuid4().hex}", time.monotonic() + PATIENCE
        while True:
            try:
                self.write(probe, b"dicedist")
                self.remove([probe])
                return
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or is_final(error) or time.monotonic() > deadline:
                    raise ValueError(f"{redacted(what)} cannot be written: {reason_of(error)}") from error
            time.sleep(PAUSE)


def is_final(error: OSError) -> bool:
    """Whether the bucket does not exist, or does not want us: that waiting will not change."""
    told = (error, error.__cause__)
    return any(isinstance(one, FileNotFoundError | PermissionError) or "Cred" in type(one).__name__ for one in told)
