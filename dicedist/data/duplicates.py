"""Find duplicates: test inputs that are also training inputs, and inputs of the data in an OOD set.

Only equal inputs are found: the same pixels or values, or the same bytes of a file. Every input has a key; equal inputs
have equal keys.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dicedist.console.lines import warn
from dicedist.data.encoded import Encoded
from dicedist.data.reading import SPLITS
from dicedist.data.sets.folder import find_images
from dicedist.data.sources import Source, Split

PUBLISHED = ("cifar10", "cifar100")  # 10 test images of CIFAR-100 are training images, in every published figure
Keys = NDArray[np.uint64]


def warn_of_duplicates(source: Source) -> None:
    if source.name in PUBLISHED:
        return
    train, test = keys_of(source.train), keys_of(source.test)
    if found := num_shared(test, train):
        warn(
            f"{found:,} of {len(test):,} test {source.kind} are also among the training {source.kind}: the test "
            "counts memorized inputs as right, so remove them from one of the two"
        )


def warn_of_overlap(sets: Mapping[str, tuple[Path, Tensor]], source: Source, root: Path) -> None:
    """Warn of OOD sets that hold some of the data. root: the folder of the data.

    Photographs are compared by their files, because data and OOD sets are decoded in different ways.
    """
    by_files = source.name == "folder" or isinstance(source.test.inputs_R, Encoded)
    files = {name: find_images(path) if by_files and path.is_dir() else [] for name, (path, _) in sets.items()}
    sizes = {file.stat().st_size for found in files.values() for file in found}

    def keys_of_split(split: str) -> Keys:
        if source.name != "folder":
            return keys_of(source.train if split == "train" else source.test)
        return keys_of_files(file for file in find_images(root / split) if file.stat().st_size in sizes)

    known = {split: keys_of_split(split) for split in SPLITS} if sets else {}
    for name, (_, inputs) in sets.items():
        keys = keys_of_files(files[name]) if by_files else keys_of_rows(inputs.numpy())
        train, test = (num_shared(keys, known[split]) for split in SPLITS)
        if train or test:
            warn(
                f"ood.sets.{name}: {train:,} of {len(keys):,} {source.kind} are also among the training, {test:,} "
                f"among the test {source.kind}: they are not out of distribution"
            )


def num_shared(some: Keys, others: Keys) -> int:
    return int(np.isin(some, others).sum())


def keys_of(split: Split) -> Keys:
    """Return the keys of a split; none if its inputs are not in memory, or come from code of the user."""
    inputs_R, rows = split.inputs_R, slice(None) if split.rows_N is None else split.rows_N.numpy()
    if isinstance(inputs_R, Encoded):
        return (inputs_R.bytes_R.astype(np.uint64) << np.uint64(32) | inputs_R.checksums_R)[rows]
    return keys_of_rows(inputs_R.numpy(), rows) if isinstance(inputs_R, Tensor) else np.empty(0, np.uint64)


def keys_of_rows(inputs_R: NDArray[Any], rows: slice | NDArray[np.int64] = slice(None)) -> Keys:
    places = np.arange(len(inputs_R))[rows]
    digests = (hashlib.blake2b(inputs_R[place].tobytes(), digest_size=8).digest() for place in places)
    return np.frombuffer(b"".join(digests), np.uint64)


def keys_of_files(files: Iterable[Path]) -> Keys:
    """Return length and checksum of each file, as in the list of encoded images."""
    contents = (file.read_bytes() for file in files)
    return np.array([len(content) << 32 | zlib.crc32(content) for content in contents], np.uint64)
