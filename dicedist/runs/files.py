"""Reading and writing files of a run's folder, which may come from somebody else: plain files only, never links."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

LARGEST_JSON = 2**28  # bytes
MARK = "sha256"  # key of the digest of the other values


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing like `open`, but refuse a link, which could point anywhere.

    Text is UTF-8 in any locale.
    """

    def opener(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if os.path.islink(name):
                raise ValueError(f"{name} is a link, and nothing is written through links in a run's folder") from error
            raise

    return open(path, mode, opener=opener, encoding=None if "b" in mode else "utf-8")


def own_folder(path: Path) -> Path:
    """Return a folder inside a run's folder; ValueError if it is a link, which could point anywhere."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and nothing is read or written through links in a run's folder")
    return path


def read_plain(path: Path, limit: int) -> bytes:
    """Read a plain file of at most `limit` bytes. Refuse pipes, which may never end, and devices."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a plain file")
        if about.st_size > limit:
            raise ValueError(f"{path} has {about.st_size:,} bytes, more than the {limit:,} allowed")
        return file.read(about.st_size)


def replace_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, sync it, then rename it. A link of that name is replaced, not followed."""
    publish({path: draft_text(text, path)})


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    publish({path: draft_json(values, path)})


def draft_json(values: Mapping[str, Any], path: Path) -> Path:
    return draft_text(dump_checked(json.loads(json.dumps(values)), indent=1), path)


def draft_text(text: str, path: Path) -> Path:
    """Write the new content of a file under a temporary name. `publish` renames it."""
    draft = draft_of(path)
    with open_own(draft, "w") as file:
        file.write(text)
    sync(draft)
    return draft


def draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def publish(drafts: Mapping[Path, Path]) -> None:
    """Replace files by their synced drafts, in this order."""
    for path, draft in drafts.items():
        draft.rename(path)
    for folder in {path.parent for path in drafts}:
        sync(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read JSON and check its digest, if it has one; ValueError if the file is damaged or no plain file."""
    text = read_plain(path, LARGEST_JSON)
    try:
        return load_checked(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged") from error


def dump_checked(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON with a digest of its values, by which `load_checked` notices accidental changes."""
    return json.dumps({**values, MARK: digest_of(values)}, indent=indent)


def load_checked(text: bytes, strict: bool = True) -> dict[str, Any]:
    """Return the values of JSON by `dump_checked`; ValueError if damaged. strict: refuse JSON without a digest."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.pop(MARK, None if strict else digest_of(found)) != digest_of(found):
        raise ValueError("these are not the values that were written")
    return found


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write safetensors like `replace_text` writes text. The caller syncs the folder."""
    draft_tensors(tensors, path).rename(path)


def draft_tensors(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Write safetensors under a temporary name, with the permissions of any new file."""
    draft = draft_of(path)
    draft.unlink(missing_ok=True)
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, draft)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    umask = os.umask(0)
    os.umask(umask)
    draft.chmod(0o666 & ~umask)  # safetensors creates files that only the owner can read
    sync(draft)
    return draft


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
