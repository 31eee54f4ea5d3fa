"""A user's own images, too many to be kept decoded: a folder, or a list (.csv, .parquet) of path, label and split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dicedist.config.schema import DataConfig
from dicedist.console.lines import printable
from dicedist.data.encoded import Encoded, Files, Listing, index, open_listed
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.reading import SPLITS
from dicedist.data.sets.folder import Found, from_folder
from dicedist.data.sets.vectors import columns_of

LISTS = (".csv", ".parquet")


def prepare_files(config: DataConfig, root: Path) -> Prepared:
    class_names, found = from_list(root, config) if root.is_file() else from_folder(root)
    folder = root if root.is_dir() else root.parent

    def build(new_array: NewArray) -> dict[str, Any]:
        listings = {}
        for split, images in found.items():
            paths, labels = zip(*images, strict=True)
            paths_R = put_texts(new_array, f"{split}_paths", paths)
            num_bytes = [(folder / path).stat().st_size for path in paths]
            listings[split] = Listing(labels, num_bytes, files_in(folder, paths_R))
        return {**index(listings, class_names, config, new_array), "kind": "files", "folder": str(folder)}

    every = [folder / path for images in found.values() for path, _ in images]
    return prepare("files", folder, every, build, root.name, config.size, config.label_column)


def files_in(folder: Path, paths_R: Any) -> Files:
    return Files(lambda row: paths_R[row].decode(), lambda row: (folder / paths_R[row].decode()).read_bytes())


def put_texts(new_array: NewArray, name: str, texts: Sequence[object]) -> Any:
    encoded = [str(text).encode() for text in texts]
    array = new_array(name, (len(encoded),), np.dtype(f"S{max(map(len, encoded))}"))
    array[:] = encoded
    return array


def from_list(file: Path, config: DataConfig) -> tuple[list[str], dict[str, Found]]:
    """Read the columns path (relative to the list's folder), split (train or test) and label, a word or a number."""
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


def open_files(prepared: Prepared, split: str, config: DataConfig) -> Encoded:
    folder = Path(prepared.about["folder"])
    return open_listed(prepared, split, config, folder, files_in(folder, prepared.array(f"{split}_paths")))


SETS = {"files": prepare_files}
OPENED = {"files": open_files}
