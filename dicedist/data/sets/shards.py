"""WebDataset's tar shards, read by index: train-*.tar and test-*.tar in a folder, or behind s3:// or http://.

The position of each image in its shard is listed once. So the order is a function of seed and epoch, a run resumes at
any step, and no shuffle buffer is needed. Shards are never unpacked. One process copies remote shards to this machine,
if they need at most data.cache_gb.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dicedist.config.schema import DataConfig
from dicedist.console.lines import printable, redacted
from dicedist.data.encoded import Encoded, Files, index, open_listed
from dicedist.data.prepared import NewArray, Prepared, home, one_process, prepare
from dicedist.data.reading import SPLITS, other_channels
from dicedist.data.remote import copy_remote
from dicedist.data.sets.folder import SUFFIXES, put_texts, text_of
from dicedist.data.sets.vectors import counted

CLASSES, SHARDS = "classes.txt", "shards.txt"  # names of classes; names of shards, if they cannot be listed
BLOCK = 512  # bytes of a block in a tar


Sample = tuple[str, int, int, int, int]  # key, number of the shard, offset, size, label


def prepare_shards(config: DataConfig, root: Path) -> Prepared:
    folder = local_copies(config.root, config.cache_gb) if config.root and "://" in config.root else root
    shards = {split: sorted(folder.glob(f"{split}-*.tar")) for split in SPLITS}
    for split, found in shards.items():
        if not found:
            where = redacted(config.root or str(root))
            raise ValueError(f"{where} holds no {split}-*.tar: python -m dicedist.data pack makes them")

    def build(new_array: NewArray) -> dict[str, Any]:
        listings = {}
        for split, paths in shards.items():
            keys, shard, offset, num_bytes, labels = zip(*listed(paths), strict=True)
            keys_R = put_texts(new_array, f"{split}_keys", keys)
            for name, values in (("shard", shard), ("offset", offset)):
                new_array(f"{split}_{name}", (len(keys),), np.int64)[:] = values
            listings[split] = labels, num_bytes, files_in(paths, keys_R, shard, offset, num_bytes)
        names = class_names(folder, [label for labels, *_ in listings.values() for label in labels])
        about = index(listings, names, config, new_array)
        return {**about, "kind": "shards", "shards": {split: list(map(str, paths)) for split, paths in shards.items()}}

    every = [path for found in shards.values() for path in found]
    return prepare("shards", folder, every, build, config.size, *other_channels(config))


def files_in(shards: list[Path], keys_R: Any, shard_R: Any, offset_R: Any, bytes_R: Any) -> Files:
    return Files(
        lambda row: f"{shards[shard_R[row]].name}/{text_of(keys_R[row])}",
        lambda row: read_at(shards[shard_R[row]], offset_R[row], bytes_R[row]),
    )


def read_at(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def open_shards(prepared: Prepared, split: str, config: DataConfig) -> Encoded:
    shards = [Path(path) for path in prepared.about["shards"][split]]
    columns = (prepared.array(f"{split}_{name}") for name in ("keys", "shard", "offset", "bytes"))
    return open_listed(prepared, split, config, shards[0].parent, files_in(shards, *columns))


def listed(shards: list[Path]) -> Iterator[Sample]:
    """Yield every image of the shards with its label, in the order of the shards."""
    for number, path in enumerate(shards):
        images: dict[str, tuple[int, int]] = {}
        labels: dict[str, int] = {}
        for key, kind, offset, size in entries(path):
            if f".{kind}" in SUFFIXES:
                images[key] = (offset, size)
            elif kind in ("cls", "json"):
                labels[key] = label_of(path, key, kind, read_at(path, offset, size))
        for key, (offset, size) in images.items():
            if key not in labels:
                raise ValueError(f"{path}: {printable(key)} has no label: write its .cls, or its .json with label")
            yield key, number, offset, size, labels[key]
        if not images:
            raise ValueError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")


def entries(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, kind, offset and size of every file in a shard."""
    length, end = path.stat().st_size, 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts or not (member.isreg() or member.isdir()):
                    raise ValueError(f"{path}: {printable(member.name)} is no plain file: pack the shard again")
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                if member.isdir():
                    continue
                if end > length:
                    raise ValueError(f"{path} ends in the middle of {printable(member.name)}: copy it again")
                stem, _, kind = place.name.partition(".")
                yield str(place.with_name(stem)), kind.lower(), member.offset_data, member.size
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no whole tar ({error}): shards are not compressed, nor cut short") from error
    if read_at(path, end, BLOCK) != bytes(BLOCK):
        raise ValueError(f"{path} has no end: it was cut short, copy it again")


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
    names = file.read_text("utf-8").splitlines()
    if max(labels) >= len(names):
        raise ValueError(f"{file} names {len(names)} classes, and the shards have the label {max(labels)}")
    return names


def local_copies(url: str, most_gb: float) -> Path:
    """Copy all remote shards to this machine and return their folder; ValueError if they do not fit."""
    folder = home() / "shards" / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with one_process(folder / ".lock", "copy the shards"):
        copy_remote(url, folder, [f"{split}-*.tar" for split in SPLITS], SHARDS, CLASSES, most_gb)
    return folder


SETS = {"shards": prepare_shards}
OPENED = {"shards": open_shards}
