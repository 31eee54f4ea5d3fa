"""Images that are prepared once, and mapped into memory by all processes of a node: they share one copy.

A prepared source is a folder of .npy files and an about.json. One process, which holds a lock, writes the folder under
another name and renames it when it is complete. The name contains a fingerprint of the original files. When these files
change, a new folder replaces the old one.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

log = logging.getLogger(__name__)

FORMAT = 2  # increase it when the way images are prepared changes

ABOUT, MARK = "about.json", "about"  # MARK: a digest of the rest of about.json
BLOCK = 2**24  # bytes of a block; each block has a digest
CHECKED_BLOCKS = 64  # checked at each start: 1 GiB

Array = NDArray[Any]
Dtype = type | np.dtype[Any]
NewArray = Callable[[str, tuple[int, ...], Dtype], Array]
Build = Callable[[NewArray], dict[str, Any]]  # creates and fills arrays, and returns the contents of about.json


@dataclass(frozen=True)
class Prepared:
    about: dict[str, Any]
    folder: Path | None  # None: the arrays are private to this process
    arrays: dict[str, Array]

    def array(self, name: str) -> Array:
        if self.folder is None:
            return self.arrays[name]
        # "c": pages are shared until someone writes, and a write never reaches the file. torch warns about "r".
        return np.load(self.folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)


def home() -> Path:
    """Return the folder where data is looked for without data.root, and where prepared images are kept."""
    return Path(os.environ.get("DICEDIST_DATA") or "~/.cache/dicedist").expanduser()


def refuse_unwritable(folder: Path, instead: str) -> None:
    """Refuse a folder without write permission, before work of minutes. The folder may be missing if it can be made.

    instead: the alternative that the message offers.
    """
    # os.path.exists, because Path.exists raises if a parent folder may not be entered.
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.access(nearest, os.W_OK | os.X_OK):
        owner, user = nearest.stat().st_uid, os.geteuid()
        raise ValueError(
            f"user {user} cannot write to {nearest.absolute()}, which belongs to user {owner}: "
            f"chown it to {user}, or run as its owner (docker run --user {owner}), or {instead}"
        )


def prepare(name: str, root: Path, files: Iterable[Path], build: Build, *settings: object) -> Prepared:
    """Open a prepared source, or prepare it. If the folder cannot be written, prepare it in private memory."""
    kind = f"{name}-{_short_digest(FORMAT, str(root.resolve()), *settings)}"
    changes = ((os.path.relpath(file, root), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    folder = home() / "prepared" / kind / _short_digest(*changes)
    try:
        if not folder.exists():
            _make(folder, build)
    except _Unwritable as error:
        log.warning("every process holds its own copy of the images, the shared one cannot be written: %s", error)
        return _built(build, None)
    return verified(folder)


def verified(folder: Path) -> Prepared:
    """Compare prepared data with the digests of its blocks: all blocks, or CHECKED_BLOCKS of them if there are more.

    Only the first process of a node (local rank 0) compares.
    """
    remedy = f"remove it (dicedist clean --yes data), and it is made again: {folder}"
    try:
        about = json.loads((folder / ABOUT).read_text())
        if about.pop(MARK, digest_of(about)) != digest_of(about):  # earlier versions left none
            raise ValueError
        blocks = dict(about["blocks"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / ABOUT} is damaged; {remedy}") from error
    prepared = Prepared(about, folder, {})
    if os.environ.get("LOCAL_RANK", "0") == "0":
        every = [(name, place) for name, digests in blocks.items() for place in range(len(digests))]
        # Other blocks at every start: damage is found sooner or later, and no start is slow.
        checked = every if len(every) <= CHECKED_BLOCKS else random.SystemRandom().sample(every, CHECKED_BLOCKS)
        for name, place in checked:
            try:
                whole = block_digest(prepared.array(name), place) == blocks[name][place]
            except Exception:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
                whole = False
            if not whole:
                raise ValueError(f"the prepared images are damaged ({name}.npy); {remedy}")
    return prepared


def digest_of(about: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def block_digest(array: Array, place: int) -> str:
    data = array.reshape(-1).view(np.uint8)[place * BLOCK : (place + 1) * BLOCK]
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


class _Unwritable(Exception):
    pass


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error) from error


def _short_digest(*values: object) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(f"{value!r}\n".encode())
    return digest.hexdigest()


def _make(folder: Path, build: Build) -> None:
    partial = folder.with_name("partial")
    with _writing():
        folder.parent.mkdir(parents=True, exist_ok=True)
    with one_process(folder.with_name("lock"), f"make {folder.parent.name} ready"):
        if folder.exists():
            return
        for outdated in folder.parent.glob("*/"):  # made from files that have changed, or by a process that was killed
            shutil.rmtree(outdated, ignore_errors=True)
        try:
            with _writing():
                partial.mkdir()
            built = _built(build, partial)
            with _writing():
                for array in built.arrays.values():
                    array.flush()  # type: ignore[attr-defined]
                about = json.loads(json.dumps(built.about))
                write_synced(partial / ABOUT, json.dumps({**about, MARK: digest_of(about)}))
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def one_process(path: Path, purpose: str) -> Iterator[None]:
    """Admit one process of the node at a time; the others log that they wait."""
    lock = FileLock(path)
    with _writing():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("waiting for another process to %s", purpose)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _built(build: Build, folder: Path | None) -> Prepared:
    """Build arrays in files of the folder, mapped into memory; without a folder, in private memory."""
    arrays: dict[str, Array] = {}

    def new_array(name: str, shape: tuple[int, ...], dtype: Dtype) -> Array:
        arrays[name] = _mapped(folder / f"{name}.npy", shape, dtype) if folder else np.empty(shape, dtype)
        return arrays[name]

    about = build(new_array)
    digest, blocks = hashlib.blake2b(digest_size=16), {}
    for name, array in sorted(arrays.items()):
        digest.update(name.encode())
        digest.update(array.data)
        blocks[name] = [block_digest(array, place) for place in range(-(-array.nbytes // BLOCK))]
    return Prepared({**about, "digest": digest.hexdigest(), "blocks": blocks}, None, arrays)


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _mapped(path: Path, shape: tuple[int, ...], dtype: Dtype) -> Array:
    with _writing():
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):  # a full disk fails here, not later with a SIGBUS when a page is written
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
