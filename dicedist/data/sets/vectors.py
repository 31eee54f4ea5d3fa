"""Vectors and tables: a user's own (.npz, .safetensors, .csv, .parquet), and the real ones that scikit-learn carries.

Legend: N rows, V values of a row.
"""

import contextlib
import csv
import gzip
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from dicedist.algorithm.randomness import generator
from dicedist.config.schema import DataConfig
from dicedist.console.lines import printable
from dicedist.data.prepared import NewArray, Prepared, prepare

SUFFIXES = (".npz", ".safetensors", ".csv", ".parquet")
LAYOUT = f"write data.root=FILE, or a FOLDER that holds train and test ({', '.join(SUFFIXES)})"
CARRIED = {  # in scikit-learn's own folder: the file, and its classes in the order of their numbers
    "digits": ("digits.csv.gz", [str(digit) for digit in range(10)]),
    "wine": ("wine_data.csv", ["class_0", "class_1", "class_2"]),
    "breast_cancer": ("breast_cancer.csv", ["malignant", "benign"]),
}
SPLITS = ("train", "test")
Floats = NDArray[np.float32]


class Table(NamedTuple):
    """What one file holds. Labels are numbers, or words that name their class."""

    vectors_NV: Floats
    labels: Sequence[int] | Sequence[str] | None
    split: Sequence[str] | None  # of each row: train or test
    class_names: list[str] | None


def prepare_vectors(config: DataConfig, root: Path) -> Prepared:
    files = files_in(root)

    def build(new_array: NewArray) -> dict[str, Any]:
        tables = {name: read_table(file, config.label_column) for name, file in files.items()}
        names = classes(tables, files)
        labels = {name: numbered(table, names, files[name]) for name, table in tables.items()}
        vectors = {name: table.vectors_NV for name, table in tables.items()}
        if len(files) == 1:
            vectors, labels = divided(vectors["train"], labels["train"], tables["train"].split, config, files["train"])
        return fill(new_array, vectors, labels, names, files)

    folder = root if root.is_dir() else root.parent
    return prepare("vectors", folder, files.values(), build, root.name, *settings(config))


def prepare_carried(config: DataConfig, root: Path) -> Prepared:
    """scikit-learn is looked up but not imported, which would take a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ValueError(f"data={config.name} is read from scikit-learn's files: pip install 'dicedist[vectors]'")
    folder = Path(found.origin).parent / "datasets" / "data"
    name, class_names = CARRIED[config.name]

    def build(new_array: NewArray) -> dict[str, Any]:
        opened = gzip.open(folder / name, "rt") if name.endswith(".gz") else open(folder / name)
        with opened as file:
            rows_NV = np.loadtxt(file, delimiter=",", skiprows=0 if name.endswith(".gz") else 1, dtype=np.float64)
        vectors_NV, labels_N = rows_NV[:, :-1].astype(np.float32), rows_NV[:, -1].astype(np.int64)
        vectors, labels = divided(vectors_NV, labels_N, None, config, folder / name)
        return fill(new_array, vectors, labels, class_names, {"train": folder / name})

    return prepare(config.name, folder, [folder / name], build, *settings(config))


def settings(config: DataConfig) -> tuple[object, ...]:
    return config.label_column, config.test_fraction, config.split_seed


def files_in(root: Path) -> dict[str, Path]:
    """The file of each split, or one file for both, called train."""
    if root.is_file():
        return {"train": known(root)}
    if not root.is_dir():
        raise ValueError(f"data.root={root} does not exist: {LAYOUT}")
    files = {}
    for split in SPLITS:
        found = [root / f"{split}{suffix}" for suffix in SUFFIXES if (root / f"{split}{suffix}").is_file()]
        if len(found) != 1:
            raise ValueError(f"{root} holds {len(found)} files {split}.*, one is needed: {LAYOUT}")
        files[split] = found[0]
    return files


def known(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: vectors are read from {', '.join(SUFFIXES)}")
    return path


def read_table(path: Path, label_column: str = "label") -> Table:
    """ValueError of one line if the file is not what its ending says, or a value is not a finite number."""
    table = READERS[known(path).suffix](path, label_column)
    vectors_NV = table.vectors_NV
    if vectors_NV.ndim != 2 or not vectors_NV.size:
        raise ValueError(f"{path}: x has the shape {list(vectors_NV.shape)}, write vectors [N, V]")
    for name, column in (("labels", table.labels), ("split", table.split)):
        if column is not None and len(column) != len(vectors_NV):
            raise ValueError(f"{path}: {len(vectors_NV):,} vectors and {len(column):,} {name}, write one for each")
    if not (finite_NV := np.isfinite(vectors_NV)).all():
        row, column_ = np.argwhere(~finite_NV)[0]
        raise ValueError(f"{path}: row {row}, value {column_} is {vectors_NV[row, column_]}: fill or remove the row")
    return table


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file makes numpy, safetensors and pyarrow raise anything
        raise ValueError(f"{path} cannot be read: {printable(' '.join(str(error).split())[:200])}") from error


def read_arrays(path: Path, label_column: str) -> Table:
    """x [N, V], y [N] and perhaps class_names of an .npz, or of a .safetensors, which cannot hold names."""
    with readable(path):
        arrays = load_file(path) if path.suffix == ".safetensors" else {}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                for name in file.files:
                    arrays[name] = numbers_of(file, name)
    if "x" not in arrays:
        raise ValueError(f"{path} holds {', '.join(arrays) or 'nothing'}: write x [N, V] and y [N]")
    x, y, names = arrays["x"], arrays.get("y"), arrays.get("class_names")
    if x.dtype.kind not in "fiub":
        raise ValueError(f"{path}: x is {x.dtype}, write numbers")
    if y is not None and (y.dtype.kind not in "iu" or y.ndim != 1):
        raise ValueError(f"{path}: y is {y.dtype} {list(y.shape)}, write whole numbers [N] from 0, and class_names")
    class_names = None if names is None else [str(name) for name in names]
    return Table(x.astype(np.float32), None if y is None else y.tolist(), None, class_names)


def numbers_of(file: Any, name: str) -> NDArray[Any]:
    try:
        return file[name]
    except ValueError as error:
        if "Object arrays" in str(error):
            raise ValueError(f"{name} holds objects, as rows of different widths are: write numbers [N, V]") from error
        raise


def read_columns(path: Path, label_column: str) -> Table:
    """A column of labels, perhaps one called split, and numbers."""
    columns = columns_of(path)
    numbers = {name: values for name, values in columns.items() if name not in (label_column, "split")}
    for name, values in numbers.items():
        try:
            numbers[name] = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: column {printable(name)} holds no numbers ({error}): remove it, or write it as numbers"
            ) from error
    labels, split = columns.get(label_column), columns.get("split")
    return Table(
        np.stack(list(numbers.values()), 1) if numbers else np.empty((0, 0), np.float32),
        None if labels is None else [str(label) for label in labels],
        None if split is None else [str(part) for part in split],
        None,
    )


def columns_of(path: Path) -> dict[str, Any]:
    """The columns of a .csv, as words, or of a .parquet."""
    return csv_columns(path) if path.suffix == ".csv" else parquet_columns(path)


def csv_columns(path: Path) -> dict[str, Any]:
    with readable(path), path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"{path}: line {line} has {len(row)} values, the header names {len(header)}")
    columns = dict(zip(header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True))
    if len(columns) < len(header):
        raise ValueError(f"{path}: two columns have one name")
    return columns


def parquet_columns(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'dicedist[vectors]', or write it as .csv")
    from pyarrow import parquet

    with readable(path):
        table = parquet.read_table(path)
        return {name: table.column(name).to_numpy() for name in table.column_names}


def classes(tables: dict[str, Table], files: dict[str, Path]) -> list[str]:
    """The names of the classes in the order of their numbers: as the training file says, or as its labels are."""
    table = tables["train"]
    if table.labels is None:
        raise ValueError(f"{files['train']} has no labels: write y in it, or data.label_column=COLUMN of a table")
    if table.class_names is not None:
        return table.class_names
    words = {str(label) for label in table.labels}
    if all(word.lstrip("-").isdigit() for word in words):
        if isinstance(table.labels[0], int):
            return counted([int(label) for label in table.labels], files["train"], "class_names in it")
        return sorted(words, key=int)
    return sorted(words)


def counted(labels: Sequence[int], file: Path, names: str) -> list[str]:
    """Names of classes that have only numbers. names: where others could be written."""
    if max(labels) >= len(labels):
        raise ValueError(
            f"{file} has {len(labels):,} labels and one of them is {max(labels)}: number the classes from 0, or write "
            f"{names}"
        )
    return [str(number) for number in range(max(labels) + 1)]


def numbered(table: Table, names: Sequence[str], file: Path) -> NDArray[np.int64]:
    if table.labels is None:
        raise ValueError(f"{file} has no labels: write y in it, or data.label_column=COLUMN of a table")
    if len(names) < 2:
        raise ValueError(f"{file} holds {len(names)} classes, two are the least")
    if isinstance(table.labels[0], int):
        labels_N = np.asarray(table.labels, np.int64)
        if not (0 <= labels_N.min() and labels_N.max() < len(names)):
            raise ValueError(f"{file}: labels from {labels_N.min()} to {labels_N.max()}, of {len(names)} classes")
        return labels_N
    places = {name: place for place, name in enumerate(names)}
    if unknown := sorted({str(label) for label in table.labels} - places.keys()):
        raise ValueError(f"{file}: the class {printable(unknown[0])!r} is not among those of the training rows")
    return np.array([places[str(label)] for label in table.labels])


def divided(
    vectors_NV: Floats, labels_N: NDArray[np.int64], split: Sequence[str] | None, config: DataConfig, file: Path
) -> tuple[dict[str, Floats], dict[str, NDArray[np.int64]]]:
    """One file's rows for training and for the test: as its column `split` says, or a share of each class."""
    if split is not None:
        if strangers := sorted(set(split) - set(SPLITS)):
            raise ValueError(f"{file}: the column split holds {printable(strangers[0])!r}, write train or test")
        is_test_N = np.array(split) == "test"
    else:
        is_test_N = np.zeros(len(labels_N), bool)
        order_N = torch.randperm(len(labels_N), generator=generator("cpu", config.split_seed, "test")).numpy()
        for label in range(labels_N.max() + 1):
            of_class = order_N[labels_N[order_N] == label]
            is_test_N[of_class[: round(config.test_fraction * len(of_class))]] = True
    if is_test_N.all() or not is_test_N.any():
        raise ValueError(
            f"{file}: {is_test_N.sum():,} of {len(labels_N):,} rows are for the test; some must be, not all"
        )
    rows = {"train": ~is_test_N, "test": is_test_N}
    return {name: vectors_NV[chosen] for name, chosen in rows.items()}, {
        name: labels_N[chosen] for name, chosen in rows.items()
    }


def fill(
    new_array: NewArray,
    vectors: dict[str, Floats],
    labels: dict[str, NDArray[np.int64]],
    class_names: Sequence[str],
    files: dict[str, Path],
) -> dict[str, Any]:
    widths = {name: vectors_NV.shape[1] for name, vectors_NV in vectors.items()}
    if widths["train"] != widths["test"]:
        raise ValueError(
            f"{files['test']} has vectors of {widths['test']} values, {files['train']} of {widths['train']}: "
            "write the same columns in both"
        )
    for name in SPLITS:
        new_array(f"{name}_vectors", vectors[name].shape, np.float32)[:] = vectors[name]
        new_array(f"{name}_labels", labels[name].shape, np.int64)[:] = labels[name]
    mean, std = moments(vectors["train"])
    return {"kind": "vectors", "class_names": list(class_names), "mean": mean, "std": std}


def moments(vectors_NV: Iterable[Any]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each value over the training rows; a value that never changes has deviation 1."""
    wide_NV = np.asarray(vectors_NV, np.float64)
    std_V = wide_NV.std(0)
    return wide_NV.mean(0).tolist(), np.where(std_V > 0, std_V, 1).tolist()


READERS = {".npz": read_arrays, ".safetensors": read_arrays, ".csv": read_columns, ".parquet": read_columns}
SETS = {"vectors": prepare_vectors, **dict.fromkeys(CARRIED, prepare_carried)}
