"""A run's folder in a bucket, or at any other URL of fsspec: s3://, gs://, file://. Files have the names of run.py.

Each written file is read back and compared. So a store that truncates, changes or drops files is noticed while the disk
still has them. Credentials come from the usual places of the store's library.
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

OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}}  # default: no cached listings
FRESH = {"use_listings_cache": False}
PATIENCE, PAUSE = 30.0, 2.0  # seconds


class Unreachable(OSError):
    """Failure of the bucket. The message is one line without secrets."""


@dataclass(frozen=True)
class Bucket:
    url: str
    files: Any  # fsspec's file system
    path: str

    @classmethod
    def at(cls, url: str, what: str) -> Self:
        """Open the bucket at a URL. what: its name in messages, such as run.remote=s3://..."""
        url = url.rstrip("/")
        options = OPTIONS.get(url.partition("://")[0], FRESH)
        return cls(url, *open_url(url, redacted(what), **options))

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """Return the bucket of run.remote; None if the key is not set."""
        remote = config.run.remote
        return cls.at(f"{remote.rstrip('/')}/{config.run.name}", f"run.remote={remote}") if remote else None

    def __str__(self) -> str:
        return redacted(self.url)

    def inside(self, name: str) -> "Bucket":
        return Bucket(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    def listed(self) -> dict[str, list[Any]]:
        """Return the size and the state of every file, by relative name. The state changes with the content."""
        with self.asked():
            found = self.files.find(self.path, detail=True)
        root = PurePosixPath(self.path)
        return {str(PurePosixPath(path).relative_to(root)): state_in(info) for path, info in found.items()}

    def holding(self, name: str) -> list["Bucket"]:
        """Return the folders in this bucket that hold a file of this name; this folder if it does, or if none does."""
        try:
            found = self.listed()
        except FileNotFoundError as error:
            raise ValueError(f"{self} cannot be read: {reason_of(error)}") from error
        below = [self.inside(folder) for folder, _, file in (path.partition("/") for path in found) if file == name]
        return below if below and name not in found else [self]

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a file of at most `limit` bytes; None if there is no such file."""
        with self.asked(), contextlib.suppress(FileNotFoundError):
            if int(self.files.info(f"{self.path}/{name}")["size"] or 0) > limit:
                raise ValueError(f"{self}/{name} has more than the {limit:,} bytes allowed")
            return bytes(self.files.cat_file(f"{self.path}/{name}"))
        return None

    def take(self, name: str, path: Path, size: int) -> str:
        """Download a file of this size. Return its sha256."""
        sha256, count = hashlib.sha256(), 0
        with path.open("wb") as target:
            for piece in self.pieces(name):
                target.write(piece)
                sha256.update(piece)
                count += len(piece)
                if count > size:
                    break
        if count != size:
            raise ValueError(f"{self}/{name} has {'more' if count > size else 'fewer'} than its {size:,} bytes")
        return sha256.hexdigest()

    def write(self, name: str, content: bytes) -> None:
        """Write under a temporary name first, so that the old file stays until the new one is complete."""
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
        """Upload a file that does not change during the upload."""
        with self.asked():
            self.files.put_file(str(path), f"{self.path}/{name}")
        self.compare(name, sha256)

    def create(self, name: str, content: bytes) -> bool:
        """Create a file unless it exists. Return whether this call created it: of concurrent calls only one does."""
        with self.asked():
            try:
                with self.files.open(f"{self.path}/{name}", "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Remove files in this order. Missing files are ignored."""
        for name in names:
            with self.asked(), contextlib.suppress(FileNotFoundError):
                self.files.rm_file(f"{self.path}/{name}")

    def compare(self, name: str, sha256: str) -> None:
        found = hashlib.sha256()
        for piece in self.pieces(name):
            found.update(piece)
        if found.hexdigest() != sha256:
            raise Unreachable(f"{self}/{name} came back other than it was sent")

    def pieces(self, name: str) -> Iterator[bytes]:
        with self.asked(), self.files.open(f"{self.path}/{name}", "rb", cache_type="none") as file:
            while piece := file.read(CHUNK):
                advance()
                yield piece

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Convert the errors of the stores' libraries to Unreachable."""
        try:
            yield
        except (Unreachable, FileNotFoundError, ValueError):
            raise
        except Exception as error:
            raise Unreachable(f"{self}: {reason_of(error)}") from error

    def refuse_unwritable(self, what: str) -> None:
        """Raise ValueError if the bucket does not exist or cannot be written, after retries for PATIENCE seconds."""
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
    """Return whether a retry is useless: the bucket does not exist, or access is denied."""
    causes = (error, error.__cause__)
    return any(isinstance(one, FileNotFoundError | PermissionError) or "Cred" in type(one).__name__ for one in causes)
