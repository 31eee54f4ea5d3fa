"""Files of a run's folder, which may come from somebody else: no link is followed, nothing but plain files is read."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from dicedist.runs.checkpoint import allow_as_usual, digest_of, sync

LARGEST_JSON = 2**28  # bytes
MARK = "sha256"  # of the rest of the file


def open_own(path: Path, mode: str) -> IO[Any]:
    """Opens a file like `open`, for writing, but a link in place of the file is refused: it could lead anywhere."""

    def opener(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if os.path.islink(name):
                raise ValueError(f"{name} is a link, and nothing is written through links in a run's folder") from error
            raise

    return open(path, mode, opener=opener)


def replace_text(path: Path, text: str) -> None:
    """Gives a file its name only when it is whole and on the disk; a link of that name is replaced, not followed."""
    draft = path.with_name(f".{path.name}.partial")
    with open_own(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """Adds a digest of the rest, so that `read_json` can tell whether anything was changed by accident."""
    plain = json.loads(json.dumps(values))
    replace_text(path, json.dumps({**plain, MARK: digest_of(plain)}, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """ValueError if it is no such file, or a damaged one; files of earlier versions have no digest."""
    try:
        found = json.loads(read_plain(path, LARGEST_JSON))
        if not isinstance(found, dict) or found.pop(MARK, digest_of(found)) != digest_of(found):
            raise ValueError(f"{path} is damaged")
    except RecursionError as error:
        raise ValueError(f"{path} is damaged") from error
    return found


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes safetensors in the same way, with the permissions that any new file has."""
    draft = path.with_name(f".{path.name}.partial")
    draft.unlink(missing_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, draft)
    allow_as_usual(draft)
    draft.rename(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a plain file of safetensors."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a plain file")
    return load_file(path)


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
