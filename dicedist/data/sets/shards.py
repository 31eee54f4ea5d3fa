"""WebDataset's tar shards, read by index: train-*.tar and test-*.tar in a folder, or behind s3:// or http://.

Where each image lies in its shard is listed once, so the order stays a function of seed and epoch, a run resumes at any
step, and no buffer is shuffled. Nothing is ever unpacked. Remote shards are copied to this machine, by one process, if
they are no more than data.cache_gb.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from dicedist.config.schema import DataConfig
from dicedist.console.lines import printable, redacted
from dicedist.data.encoded import Encoded
from dicedist.data.prepared import NewArray, Prepared, home, one_process, prepare
from dicedist.data.remote import Remote
from dicedist.data.sets.files import Listing, index, opened
from dicedist.data.sets.folder import SUFFIXES, answer_for_corrupt
from dicedist.data.sets.vectors import SPLITS, counted

CLASSES, SHARDS = "classes.txt", "shards.txt"  # names of classes, one a line; names of shards, where none can be listed
BLOCK = 512  # bytes that a tar is made of


class Sample(NamedTuple):
    key: str
    shard: int
    offset: int
    size: int
    label: int


def prepare_shards(config: DataConfig, root: Path) -> Prepared:
    remote = Remote.at(config.root) if config.root else None
    folder = copies(remote, config) if remote else root
    shards = {split: sorted(folder.glob(f"{split}-*.tar")) for split in SPLITS}
    for split, found in shards.items():
        if not found:
            where = redacted(config.root or str(root))
            raise ValueError(f"{where} holds no {split}-*.tar: python -m dicedist.data pack makes them")

    def build(new_array: NewArray) -> dict[str, Any]:
        samples = {split: list(listed(found)) for split, found in shards.items()}
        listings = {split: listing(shards[split], found) for split, found in samples.items()}
        names = class_names(folder, [sample.label for found in samples.values() for sample in found])
        about = index(listings, names, config, new_array)
        for split, found in samples.items():
            for name in ("shard", "offset"):
                new_array(f"{split}_{name}", (len(found),), np.int64)[:] = [getattr(sample, name) for sample in found]
            keys = [sample.key.encode() for sample in found]
            new_array(f"{split}_keys", (len(keys),), np.dtype(f"S{max(map(len, keys))}"))[:] = keys  # type: ignore[arg-type]
        paths = {split: [str(path) for path in found] for split, found in shards.items()}
        return {**about, "kind": "shards", "shards": paths}

    prepared = prepare("shards", folder, [path for found in shards.values() for path in found], build, config.size)
    answer_for_corrupt(prepared, config.on_corrupt)
    return prepared


def listed(shards: list[Path]) -> Iterator[Sample]:
    """Every image of the shards with its label, in the order in which they lie there."""
    for number, path in enumerate(shards):
        images: dict[str, tuple[int, int]] = {}
        labels: dict[str, int] = {}
        for key, kind, offset, size, text in entries(path):
            if f".{kind}" in SUFFIXES:
                images[key] = (offset, size)
            elif kind in ("cls", "json"):
                labels[key] = label_of(path, key, kind, text())
        for key, (offset, size) in images.items():
            if key not in labels:
                raise ValueError(f"{path}: {printable(key)} has no label: write its .cls, or its .json with label")
            yield Sample(key, number, offset, size, labels[key])
        if not images:
            raise ValueError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")


def entries(path: Path) -> Iterator[tuple[str, str, int, int, Callable[[], bytes]]]:
    """Key, kind, offset and size of every member, and its contents when asked."""
    length = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            end = 0
            for member in tar:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts or not (member.isreg() or member.isdir()):
                    raise ValueError(f"{path}: {printable(member.name)} is no plain file in the shard: pack it anew")
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                if member.isdir():
                    continue
                if end > length:
                    raise ValueError(f"{path} ends in the middle of {printable(member.name)}: copy it again")
                stem, _, kind = place.name.partition(".")
                key = str(place.with_name(stem))
                yield key, kind.lower(), member.offset_data, member.size, partial(contents, tar, member)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no whole tar ({error}): shards are not compressed, nor cut short") from error
    with path.open("rb") as file:
        file.seek(end)
        if file.read(BLOCK) != bytes(BLOCK):
            raise ValueError(f"{path} has no end: it was cut short, copy it again")


def contents(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def label_of(path: Path, key: str, kind: str, text: bytes) -> int:
    try:
        found = int(text) if kind == "cls" else json.loads(text)["label"]
        if type(found) is not int or found < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: the label of {printable(key)} is {printable(text[:40].decode(errors='replace'))!r}, write a "
            'whole number from 0 in .cls, or {"label": 0} in .json'
        ) from error
    return found


def class_names(folder: Path, labels: list[int]) -> list[str]:
    file = folder / CLASSES
    if not file.exists():
        return counted(labels, folder, f"their names into {CLASSES}")
    names = file.read_text().splitlines()
    if max(labels) >= len(names):
        raise ValueError(f"{file} names {len(names)} classes, and the shards have the label {max(labels)}")
    return names


def listing(shards: list[Path], samples: list[Sample]) -> Listing:
    def read(row: int) -> bytes:
        return read_range(shards[samples[row].shard], samples[row].offset, samples[row].size)

    names = [f"{shards[sample.shard].name}/{sample.key}" for sample in samples]
    return Listing(names, [sample.label for sample in samples], [sample.size for sample in samples], read)


def read_range(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def open_shards(prepared: Prepared, split: str, config: DataConfig) -> Encoded:
    shards = [Path(path) for path in prepared.about["shards"][split]]
    columns = ("keys", "shard", "offset", "bytes")
    keys_R, shard_R, offset_R, bytes_R = (prepared.array(f"{split}_{column}") for column in columns)

    def read(row: int) -> bytes:
        return read_range(shards[shard_R[row]], int(offset_R[row]), int(bytes_R[row]))

    return opened(prepared, split, config, read, lambda row: f"{shards[shard_R[row]]}/{keys_R[row].decode()}")


def copies(remote: Remote, config: DataConfig) -> Path:
    """The folder that holds this machine's copies of all remote shards; ValueError if they do not fit."""
    folder = home() / "shards" / hashlib.blake2b(remote.url.encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with one_process(folder / ".lock", "copy the shards"):
        remote.copy_to(folder, [f"{split}-*.tar" for split in SPLITS], SHARDS, CLASSES, config.cache_gb)
    return folder


SETS = {"shards": prepare_shards}
OPENED = {"shards": open_shards}
