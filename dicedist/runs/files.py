"""Files of a run's folder, which may come from somebody else: no link is followed, nothing but plain files is read."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save_file
from torch import Tensor

from dicedist.runs.checkpoint import allow_as_usual, sync


def open_own(path: Path, mode: str) -> IO[Any]:
    """As `open` for writing, but a link in place of the file is refused: it could lead anywhere."""

    def opener(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if os.path.islink(name):
                raise ValueError(f"{name} is a link, and nothing is written through links in a run's folder") from error
            raise

    return open(path, mode, opener=opener)


def replace_text(path: Path, text: str) -> None:
    """Under its name only when it is whole and on the disk; a link of that name is replaced, not followed."""
    draft = path.with_name(f".{path.name}.partial")
    with open_own(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """As safetensors, in the same way, with the permissions that any new file has."""
    draft = path.with_name(f".{path.name}.partial")
    draft.unlink(missing_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, draft)
    allow_as_usual(draft)
    draft.rename(path)


def read_plain(path: Path, limit: int) -> bytes:
    """The content of a plain file of at most so many bytes; a pipe would never end, and a device is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a plain file")
        if about.st_size > limit:
            raise ValueError(f"{path} has {about.st_size:,} bytes, more than the {limit:,} that it may have")
        return file.read(limit)
