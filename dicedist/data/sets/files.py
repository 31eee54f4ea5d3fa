"""A user's own images, too many to be kept decoded: a folder, or a list (.csv, .parquet) of path, label and split.

They are listed once: size and soundness of every file, by its head. What is listed is cached like prepared images.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dicedist.config.schema import DataConfig
from dicedist.console.lines import printable
from dicedist.console.progress import Progress
from dicedist.data.encoded import Encoded, Examined, examine, reason
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.sets.folder import answer_for_corrupt, moments, require_same_classes, scan
from dicedist.data.sets.vectors import SPLITS, columns_of

LISTS = (".csv", ".parquet")
MEASURED = 2000  # images that mean and deviation are taken from
Found = list[tuple[Path, int]]  # path in the folder, label


class Listing(NamedTuple):
    """The images of one split, in their order."""

    names: list[str]  # for messages; of files, their paths
    labels: list[int]
    num_bytes: Sequence[int]
    read: Callable[[int], bytes]


def prepare_files(config: DataConfig, root: Path) -> Prepared:
    class_names, files = from_list(root, config) if root.is_file() else from_folder(root)
    folder = root if root.is_dir() else root.parent

    def build(new_array: NewArray) -> dict[str, Any]:
        listings = {
            split: Listing(
                [str(path) for path, _ in found],
                [label for _, label in found],
                [(folder / path).stat().st_size for path, _ in found],
                partial(read_found, folder, found),
            )
            for split, found in files.items()
        }
        about = index(listings, class_names, config, new_array)
        for split, listing in listings.items():
            paths = [name.encode() for name in listing.names]
            new_array(f"{split}_paths", (len(paths),), np.dtype(f"S{max(map(len, paths))}"))[:] = paths  # type: ignore[arg-type]
        return {**about, "kind": "files", "folder": str(folder)}

    listed = [folder / path for found in files.values() for path, _ in found]
    prepared = prepare("files", folder, listed, build, root.name, config.size, config.label_column)
    answer_for_corrupt(prepared, config.on_corrupt)
    return prepared


def read_found(folder: Path, found: Found, row: int) -> bytes:
    return (folder / found[row][0]).read_bytes()


def from_folder(root: Path) -> tuple[list[str], dict[str, Found]]:
    scanned = {split: scan(root / split) for split in SPLITS}
    require_same_classes(root, scanned["train"].class_names, scanned["test"].class_names)
    return scanned["train"].class_names, {
        split: [(path.relative_to(root), label) for path, label in zip(found.files, found.labels, strict=True)]
        for split, found in scanned.items()
    }


def from_list(file: Path, config: DataConfig) -> tuple[list[str], dict[str, Found]]:
    """Columns path (relative to the list's folder), split (train or test) and the label, a word or a number."""
    if file.suffix not in LISTS:
        raise ValueError(f"data.root={file}: write a folder, or a list {' or '.join(LISTS)} of path, label and split")
    columns = columns_of(file)
    if lacking := [name for name in ("path", config.label_column, "split") if name not in columns]:
        raise ValueError(f"{file} has no column {lacking[0]}: write path, {config.label_column} and split in it")
    labels = [str(label) for label in columns[config.label_column]]
    names = sorted(set(labels), key=int if all(map(str.isdigit, labels)) else str)
    if len(names) < 2:
        raise ValueError(f"{file} names {len(names)} classes, two are the least")
    number = {name: place for place, name in enumerate(names)}
    files: dict[str, Found] = {split: [] for split in SPLITS}
    for path, label, split in zip(columns["path"], labels, columns["split"], strict=True):
        if split not in files:
            raise ValueError(f"{file}: split is {printable(str(split))!r}, write train or test")
        if not (file.parent / str(path)).is_file():
            raise ValueError(f"{file} names {printable(str(path))}, which is not in {file.parent}")
        files[split].append((Path(str(path)), number[label]))
    for split, found in files.items():
        if len({label for _, label in found}) < len(names):
            raise ValueError(f"{file}: {split} has images of {len({y for _, y in found})} of {len(names)} classes")
    return names, files


def index(
    listings: dict[str, Listing], class_names: Sequence[str], config: DataConfig, new_array: NewArray
) -> dict[str, Any]:
    """Fills the arrays that every source of encoded images has, and returns what its about.json says."""
    about: dict[str, Any] = {"class_names": list(class_names), "corrupt": {}}
    progress = Progress(sum(len(listing.names) for listing in listings.values()), "images listed", stream=sys.stderr)
    done = 0
    for split, listing in listings.items():
        number = len(listing.names)
        sizes_R2 = new_array(f"{split}_sizes", (number, 2), np.int32)
        plain_R = new_array(f"{split}_plain", (number,), np.bool_)
        checksums_R = new_array(f"{split}_checksums", (number,), np.uint32)
        new_array(f"{split}_labels", (number,), np.int64)[:] = listing.labels
        new_array(f"{split}_bytes", (number,), np.int64)[:] = listing.num_bytes
        corrupt = []
        with ThreadPoolExecutor(config.num_threads) as threads:
            for row, found in enumerate(threads.map(lambda row: examined(listing.read, row), range(number))):  # noqa: B023
                if isinstance(found, str):
                    corrupt.append((row, listing.names[row], found))
                    found = Examined(1, 1, False, 0)
                sizes_R2[row], plain_R[row], checksums_R[row] = found[:2], found.plain, found.checksum
                done += 1
                progress.show(done)
        if split == "train":
            good = np.delete(np.arange(number), [row for row, *_ in corrupt])
            about["mean"], about["std"], more = measured(listing, good, config)
            corrupt = sorted([*corrupt, *((row, listing.names[row], why) for row, why in more.items())])
        about["corrupt"][split] = corrupt
    progress.clear()
    return about


def examined(read: Callable[[int], bytes], row: int) -> Examined | str:
    try:
        return examine(read(row))
    except (ValueError, OSError) as error:
        return str(error)


def measured(
    listing: Listing, rows: NDArray[np.int64], config: DataConfig
) -> tuple[list[float], list[float], dict[int, str]]:
    """Mean and deviation of each colour over images spread evenly over the list, and which of these are damaged, why.

    What is damaged in the middle of a file shows only here, where it is decoded.
    """
    chosen = rows[:: max(1, -(-len(rows) // MEASURED))].tolist()
    none: Any = np.empty((0, 2))

    def decoded(row: int) -> NDArray[np.uint8] | str:
        try:
            return images.decoded(row, None)
        except ValueError as error:
            return reason(error.__cause__ or error)

    with ThreadPoolExecutor(config.num_threads) as threads:
        images = Encoded(listing.read, listing.names.__getitem__, none, none, config.size, threads)
        found = dict(zip(chosen, threads.map(decoded, chosen), strict=True))
    views = [view for view in found.values() if not isinstance(view, str)]
    # An array without images has no mean; that every class has some is looked at when all are listed.
    stacked = np.stack(views) if views else np.zeros((1, 1, 1, 3), np.uint8)
    mean, std = moments(np.arange(len(stacked)), stacked)
    return mean, std, {row: view for row, view in found.items() if isinstance(view, str)}


def open_files(prepared: Prepared, split: str, config: DataConfig) -> Encoded:
    folder, paths_R = Path(prepared.about["folder"]), prepared.array(f"{split}_paths")

    def path(row: int) -> Path:
        return folder / paths_R[row].decode()

    return opened(prepared, split, config, lambda row: path(row).read_bytes(), lambda row: str(path(row)))


def opened(
    prepared: Prepared, split: str, config: DataConfig, read: Callable[[int], bytes], name: Callable[[int], str]
) -> Encoded:
    """What was listed, with a look at every image that is read: is it still as long as it was?"""
    sizes_R2, plain_R, bytes_R = (prepared.array(f"{split}_{of}") for of in ("sizes", "plain", "bytes"))

    def unchanged(row: int) -> bytes:
        try:
            data = read(row)
        except OSError as error:
            raise ValueError(f"{name(row)} was listed at the start and cannot be read: {error.strerror}") from error
        if len(data) != bytes_R[row]:
            raise ValueError(f"{name(row)} had {bytes_R[row]:,} bytes at the start, and now has {len(data):,}")
        return data

    return Encoded(unchanged, name, sizes_R2, plain_R, config.size, ThreadPoolExecutor(config.num_threads))


SETS = {"files": prepare_files}
OPENED = {"files": open_files}
