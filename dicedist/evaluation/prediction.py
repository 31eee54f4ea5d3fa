"""Predict files of images or vectors: read ahead, predict in batches, format lines."""

import contextlib
import glob
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dicedist.cluster.control import Control
from dicedist.console.lines import printable
from dicedist.console.progress import Progress
from dicedist.data.sets.folder import decode_file, find_images
from dicedist.data.sets.vectors import read_table
from dicedist.evaluation.about import VECTORS
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.inputs import prefetch

FEW = 3
COLUMNS = ("confidence", "disagreement", "ood_score")
Row = dict[str, Any]  # path, and either error or the prediction
Batches = Callable[[Sequence[int]], Iterator[list[Row]]]  # predicts the inputs of these numbers, batch by batch


def files_named(arguments: Sequence[str]) -> list[str]:
    """Return the files that the arguments name, in their order."""
    if not arguments:
        raise ValueError("name images: files, folders, patterns, or - for a list on standard input")
    return [path for argument in arguments for path in files_of(argument)]


def files_of(argument: str) -> list[str]:
    if argument == "-":
        found = [os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line]
    elif os.path.isdir(argument):
        found = [str(path) for path in find_images(Path(argument))]
    elif os.path.lexists(argument):
        found = [argument]
    elif glob.has_magic(argument):
        found = [path for path in sorted(glob.glob(argument, recursive=True)) if not os.path.isdir(path)]
    else:
        raise ValueError(f"{argument}: there is no such file or folder")
    if not found:
        raise ValueError(f"{'standard input' if argument == '-' else argument}: no images found")
    return found


def reading(
    ensemble: Ensemble, paths: Sequence[str], label_column: str, batch_size: int
) -> tuple[Sequence[str], Batches]:
    """Return a name for every input, and a function that predicts some of them, by their numbers."""
    if ensemble.about.images != VECTORS:
        return paths, lambda numbers: predict(ensemble, [paths[number] for number in numbers], batch_size)
    names, vectors_NV = vectors_in(paths, label_column, ensemble.about.columns)

    def batches(numbers: Sequence[int]) -> Iterator[list[Row]]:
        return predict_vectors(ensemble, [names[number] for number in numbers], vectors_NV[numbers], batch_size)

    return names, batches


def in_turn(batches: Batches, total: int, batch_size: int, control: Control) -> Generator[list[Row]]:
    """Spread the batches over ranks; rank 0 yields all batches in their order. All ranks call this.

    Each of n ranks predicts every n-th batch. If rank 0 closes the generator, all ranks end after the same round.
    """
    starts = range(0, total, batch_size)
    numbers = [
        number
        for start in starts[control.rank :: control.world_size]
        for number in range(start, min(start + batch_size, total))
    ]
    own = batches(numbers)
    try:
        for _ in starts[:: control.world_size]:
            for record in control.report({"rows": next(own, [])}):
                if record["rows"]:
                    yield record["rows"]
            if control.maximum(0):
                return
    except GeneratorExit:
        control.maximum(1)


def predict(ensemble: Ensemble, paths: Sequence[str], batch_size: int) -> Iterator[list[Row]]:
    """Yield one list per batch, in the order of the paths. Only one batch is decoded ahead, to save memory."""
    remaining = iter(paths)
    decode = partial(decode_file, size=ensemble.about.size, channels=len(ensemble.about.mean))
    for decoded in prefetch([Path(path) for path in paths], batch_size, decode):
        images = [Image.fromarray(image.squeeze()) for image in decoded if not isinstance(image, str)]
        answers = iter(ensemble.predict(images, batch_size).rows() if images else ())
        yield [
            {"path": next(remaining), **({"error": image} if isinstance(image, str) else next(answers))}
            for image in decoded
        ]


def vectors_in(
    paths: Sequence[str], label_column: str, columns: Sequence[str] | None
) -> tuple[list[str], NDArray[np.float32]]:
    """Return the name FILE:ROW of every vector, and the vectors [N, V]; labels in a file are ignored.

    columns: the names of the values, in the order of the training data.
    """
    tables = {path: read_table(Path(path), label_column, columns).vectors_NV for path in dict.fromkeys(paths)}
    if len(widths := {table.shape[1] for table in tables.values()}) > 1:
        raise ValueError(f"the files have vectors of {' and '.join(map(str, sorted(widths)))} values: give one width")
    names = [f"{path}:{row}" for path, table in tables.items() for row in range(len(table))]
    return names, np.concatenate(list(tables.values()))


def predict_vectors(
    ensemble: Ensemble, names: Sequence[str], vectors_NV: NDArray[np.float32], batch_size: int
) -> Iterator[list[Row]]:
    for start in range(0, len(names), batch_size):
        rows = slice(start, start + batch_size)
        answers = ensemble.predict(vectors_NV[rows], batch_size).rows()
        yield [{"path": name, **said} for name, said in zip(names[rows], answers, strict=True)]


def write(
    rows: Generator[list[Row]], total: int, layout: Callable[[Row], str], stream: TextIO, noun: str = "images"
) -> int:
    """Write a line for each input. Return the number of inputs that could be read."""
    progress, done, predicted = Progress(total, noun, stream=sys.stderr), 0, 0
    with contextlib.suppress(BrokenPipeError):  # the reader closed the pipe, as `| head` does
        for batch in rows:
            progress.clear()
            print("\n".join(map(layout, batch)), file=stream, flush=True)
            done += len(batch)
            predicted += sum("error" not in row for row in batch)
            progress.show(done, progress.rate(done))
        progress.clear()
        if not predicted:
            raise ValueError(f"no image could be read: {printable(batch[-1]['path'])}: {batch[-1]['error']}")
    rows.close()
    return predicted


def json_line(row: Row) -> str:
    """Return JSON that keeps letters of all languages, and escapes control characters and broken text."""
    text = json.dumps(row, ensure_ascii=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


class Table:
    """Formats a table row by row; paths and class names set the column widths in advance."""

    def __init__(self, paths: Sequence[str], class_names: Sequence[str], decides: bool = False):
        """decides: the ensemble is calibrated, so it abstains and gives label sets."""
        self.last = "  abstains (why): set of labels" if decides else ""
        self.path_width = max(len(printable(path)) for path in paths)
        self.label_width = max(len(name) for name in (*class_names, "label"))

    @property
    def header(self) -> str:
        titles = "  ".join(name.replace("_", " ") for name in COLUMNS)
        return f"{'path':{self.path_width}}  {'label':{self.label_width}}  {titles}{self.last}"

    def __call__(self, row: Row) -> str:
        path = f"{printable(row['path']):{self.path_width}}"
        if "error" in row:
            return f"{path}  error: {row['error']}"
        figures = "  ".join(f"{row[name]:{len(name)}.3f}" for name in COLUMNS)
        return f"{path}  {printable(row['label']):{self.label_width}}  {figures}  {advice(row)}".rstrip()


def advice(row: Row) -> str:
    """Return the reason for abstaining, and the label set if it is small."""
    labels, why = row.get("set"), row.get("abstains")
    listed = "" if labels is None else ", ".join(labels) if len(labels) <= FEW else f"{len(labels)} labels"
    return printable(": ".join(filter(None, (f"abstains ({why})" if why else "", listed))))
