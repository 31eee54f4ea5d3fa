"""Vectors and tables: files of the user (.npz, .safetensors, .csv, .parquet), and three that come with scikit-learn.

Legend: N rows, V values of a row.
"""

import contextlib
import csv
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from dicedist.config.schema import DataConfig
from dicedist.console.lines import plural, printable
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.reading import SPLITS, for_test, reason

SUFFIXES = (".npz", ".safetensors", ".csv", ".parquet")
LAYOUT = f"write data.root=FILE, or a FOLDER that holds train and test ({', '.join(SUFFIXES)})"
CARRIED = {  # in the folder of scikit-learn: the file, its header, and its classes in the order of their numbers
    "digits": ("digits.csv.gz", 0, [str(digit) for digit in range(10)]),
    "wine": ("wine_data.csv", 1, ["class_0", "class_1", "class_2"]),
    "breast_cancer": ("breast_cancer.csv", 1, ["malignant", "benign"]),
}
MISSING = ("", "nan", "null")  # words that stand for a missing label
NAMED = 5  # rows that a message names
Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Rows = dict[str, tuple[NDArray[Any], Labels]]  # of each split


class Table(NamedTuple):
    """One file. Labels are numbers, or words that name their class."""

    vectors_NV: Floats
    labels: Sequence[int] | Sequence[str] | None
    split: Sequence[str] | None  # train or test, for each row
    class_names: list[str] | None
    columns: list[str] | None = None  # names of the values; None: the file has no names


def prepare_vectors(config: DataConfig, root: Path) -> Prepared:
    read = lambda file, columns: read_table(file, config.label_column, columns)  # noqa: E731
    return prepare_tables(config, files_in(root), read, root.name)


def prepare_carried(config: DataConfig, root: Path) -> Prepared:
    return prepare_tables(config, {"train": carried_file(config.name)}, partial(read_carried, config.name))


def carried_file(name: str, asked: str | None = None) -> Path:
    """Find a file of scikit-learn without importing it, which takes a second. asked: the data set, for messages."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ValueError(f"data={asked or name} is read from scikit-learn's files: pip install 'dicedist[vectors]'")
    return Path(found.origin).parent / "datasets" / "data" / CARRIED[name][0]


def read_carried(name: str, file: Path, columns: Sequence[str] | None = None) -> Table:
    _, head, class_names = CARRIED[name]
    rows_NV = np.loadtxt(file, delimiter=",", skiprows=head, dtype=np.float64)
    return Table(rows_NV[:, :-1].astype(np.float32), rows_NV[:, -1].astype(np.int64).tolist(), None, class_names)


def prepare_tables(
    config: DataConfig,
    files: dict[str, Path],
    read: Callable[[Path, Sequence[str] | None], Table],
    *settings: object,
) -> Prepared:
    def build(new_array: NewArray) -> dict[str, Any]:
        train = read(files["train"], None)
        tables = {name: train if name == "train" else read(file, train.columns) for name, file in files.items()}
        names = classes(tables["train"], files["train"])
        rows = {name: (table.vectors_NV, numbered(table, names, files[name])) for name, table in tables.items()}
        if len(files) == 1:
            rows = divided(*rows["train"], tables["train"].split, config, files["train"])
        width, other = (rows[name][0].shape[1] for name in SPLITS)
        if width != other:
            both = f"{files['test']} has vectors of {other} values, {files['train']} of {width}"
            raise ValueError(f"{both}: write the same columns in both")
        for name, (vectors_NV, labels_N) in rows.items():
            new_array(f"{name}_vectors", vectors_NV.shape, np.float32)[:] = vectors_NV
            new_array(f"{name}_labels", labels_N.shape, np.int64)[:] = labels_N
        mean, std = moments(rows["train"][0])
        return {"kind": "vectors", "class_names": names, "mean": mean, "std": std, "columns": train.columns}

    settings = (*settings, "columns by name", config.label_column, config.test_fraction, config.split_seed)
    return prepare(config.name, files["train"].parent, files.values(), build, *settings)


def files_in(root: Path) -> dict[str, Path]:
    """Return the file of each split, or one file for both, called train."""
    if root.is_file():
        return {"train": root}
    if not root.is_dir():
        raise ValueError(f"data.root={root} does not exist: {LAYOUT}")
    files = {}
    for split in SPLITS:
        found = [root / f"{split}{suffix}" for suffix in SUFFIXES if (root / f"{split}{suffix}").is_file()]
        if len(found) != 1:
            raise ValueError(f"{root} holds {len(found)} files {split}.*, one is needed: {LAYOUT}")
        files[split] = found[0]
    return files


def read_table(path: Path, label_column: str = "label", columns: Sequence[str] | None = None) -> Table:
    """Read a file. Raise a ValueError if the file does not fit its ending, or if a value is not a finite number.

    columns: names of the values, in order, which a table must have. Arrays have no names.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: vectors are read from {', '.join(SUFFIXES)}")
    table = read_arrays(path) if path.suffix in (".npz", ".safetensors") else read_columns(path, label_column, columns)
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
        raise ValueError(f"{path} cannot be read: {reason(error)[:200]}") from error


def read_arrays(path: Path) -> Table:
    """Read x [N, V], y [N] and perhaps class_names of an .npz; a .safetensors cannot hold names."""
    with readable(path):
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        else:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: numbers_of(file, name) for name in file.files}
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


def read_columns(path: Path, label_column: str, wanted: Sequence[str] | None) -> Table:
    """Read a column of labels, perhaps one called split, and numbers."""
    columns = columns_of(path)
    labels, split = (words_in(columns.pop(name, ())) for name in (label_column, "split"))
    columns = columns if wanted is None else ordered(columns, wanted, path)
    columns = {name: numbers_in(values, name, path) for name, values in columns.items()}
    vectors_NV = np.stack(list(columns.values()), 1) if columns else np.empty((0, 0), np.float32)
    return Table(vectors_NV, labels or None, split or None, None, list(columns))


def numbers_in(values: Sequence[Any], name: str, path: Path) -> Floats:
    """Return a column as numbers. The ValueError names the rows without a number, or the column if no row has one."""
    try:
        return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        wrong = [row for row, value in enumerate(values) if not is_number(value)]
        column = f"{path}: column {printable(name)}"
        if len(wrong) == len(values):
            raise ValueError(f"{column} holds no numbers ({error}): remove it, or write it as numbers") from error
        raise ValueError(f"{column} has no number in {listed(wrong)}: fill or remove them") from error


def is_number(value: Any) -> bool:
    try:
        np.float32(value)
    except (TypeError, ValueError):
        return False
    return True


def listed(rows: Sequence[int]) -> str:
    """Return a text with the number of rows and the first of them, counted from 0."""
    more = f" and {len(rows) - NAMED} more" * (len(rows) > NAMED)
    return f"{plural(len(rows), 'row')} ({', '.join(map(str, rows[:NAMED]))}{more})"


def ordered(columns: dict[str, Any], wanted: Sequence[str], path: Path) -> dict[str, Any]:
    """Return the columns in the order of the training data; ValueError if the names differ."""
    if lacking := [name for name in wanted if name not in columns]:
        raise ValueError(f"{path} lacks the column {printable(lacking[0])}, which the training data have: add it")
    if more := [name for name in columns if name not in wanted]:
        raise ValueError(f"{path} has the column {printable(more[0])}, which the training data lack: remove it")
    return {name: columns[name] for name in wanted}


def words_in(values: Iterable[Any]) -> list[str]:
    """Return the words of a column; an empty word for null and NaN of Parquet."""
    return ["" if value is None or value != value else str(value) for value in values]


def refuse_missing(labels: Sequence[Any], path: Path) -> None:
    missing = [row for row, label in enumerate(labels) if str(label).strip().lower() in MISSING]
    if missing:
        raise ValueError(f"{path}: no label in {listed(missing)}: fill or remove them")


def columns_of(path: Path) -> dict[str, Any]:
    """Read the columns of a .csv, as words, or of a .parquet."""
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'dicedist[vectors]', or write it as .csv")
        from pyarrow import parquet

        with readable(path):
            table = parquet.read_table(path)
            return {name: table.column(name).to_numpy() for name in table.column_names}
    with readable(path), path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"{path}: line {line} has {len(row)} values, the header names {len(header)}")
    columns = dict(zip(header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True))
    if len(columns) < len(header):
        raise ValueError(f"{path}: two columns have one name")
    return columns


def classes(table: Table, file: Path) -> list[str]:
    """Return the names of the classes in the order of their numbers: from the training file, or from its labels."""
    labels = labels_of(table, file)
    if table.class_names is not None:
        return table.class_names
    if isinstance(labels[0], int):
        return counted(labels, file, "class_names in it")
    return sorted(set(labels), key=int if all(word.lstrip("-").isdigit() for word in labels) else str)


def labels_of(table: Table, file: Path) -> Sequence[Any]:
    if table.labels is None:
        raise ValueError(f"{file} has no labels: write y in it, or data.label_column=COLUMN of a table")
    refuse_missing(table.labels, file)
    return table.labels


def counted(labels: Sequence[int], file: Path, names: str) -> list[str]:
    """Return names for classes that have only numbers. names: where to write better names, for messages."""
    if max(labels) >= len(labels):
        found = f"{file} has {len(labels):,} labels and one of them is {max(labels)}"
        raise ValueError(f"{found}: number the classes from 0, or write {names}")
    return [str(number) for number in range(max(labels) + 1)]


def numbered(table: Table, names: Sequence[str], file: Path) -> Labels:
    labels = labels_of(table, file)
    if len(names) < 2:
        raise ValueError(f"{file} holds {len(names)} classes, at least two are needed")
    if isinstance(labels[0], str):
        places = {name: place for place, name in enumerate(names)}
        if unknown := sorted(set(labels) - places.keys()):
            raise ValueError(f"{file}: the class {printable(unknown[0])!r} is not among those of the training rows")
        labels = [places[label] for label in labels]
    labels_N = np.asarray(labels, np.int64)
    if not (0 <= labels_N.min() and labels_N.max() < len(names)):
        raise ValueError(f"{file}: labels from {labels_N.min()} to {labels_N.max()}, of {len(names)} classes")
    return labels_N


def divided(
    inputs_N: NDArray[Any], labels_N: Labels, split: Sequence[str] | None, config: DataConfig, file: Path
) -> Rows:
    """Divide the rows of one file by its column `split`, or take a share of each class as the test set."""
    if split is not None:
        if strangers := sorted(set(split) - set(SPLITS)):
            raise ValueError(f"{file}: the column split holds {printable(strangers[0])!r}, write train or test")
        is_test_N = np.array(split) == "test"
    else:
        is_test_N = for_test(labels_N, config)
    if is_test_N.all() or not is_test_N.any():
        found = f"{is_test_N.sum():,} of {len(labels_N):,} rows"
        raise ValueError(f"{file}: {found} are for the test; some must be, not all")
    return {name: (inputs_N[rows], labels_N[rows]) for name, rows in (("train", ~is_test_N), ("test", is_test_N))}


def moments(vectors_NV: NDArray[Any]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each value; a value that never changes has deviation 1."""
    wide_NV = vectors_NV.astype(np.float64)
    std_V = wide_NV.std(0)
    return wide_NV.mean(0).tolist(), np.where(std_V > 0, std_V, 1).tolist()


SETS = {"vectors": prepare_vectors, **dict.fromkeys(CARRIED, prepare_carried)}
