"""An ensemble's predictions for image files: finds the files, decodes ahead, predicts in batches, formats lines."""

import contextlib
import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from dicedist.console.lines import printable
from dicedist.console.progress import Progress
from dicedist.data.sets.folder import decode_file, find_images
from dicedist.evaluation.ensemble import Ensemble

COLUMNS = ("confidence", "disagreement", "ood_score")
DECODERS = 4  # threads
Row = dict[str, Any]  # path, and either error or the prediction
Decoded = NDArray[np.uint8] | str  # an image, or the reason why it cannot be decoded


def files_named(arguments: Sequence[str]) -> list[str]:
    """The files that the arguments stand for, in their order."""
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


def predict(ensemble: Ensemble, paths: Sequence[str], batch_size: int) -> Iterator[list[Row]]:
    """One list per batch, in the order of the paths. Only the next batch is decoded ahead, so memory stays small."""
    for batch, decoded in decoded_batches(paths, batch_size, ensemble.about.size):
        images = [image for image in decoded if not isinstance(image, str)]
        answers = iter(answer(ensemble, np.stack(images)) if images else ())
        yield [
            {"path": path, **({"error": image} if isinstance(image, str) else next(answers))}
            for path, image in zip(batch, decoded, strict=True)
        ]


def decoded_batches(paths: Sequence[str], batch_size: int, size: int) -> Iterator[tuple[Sequence[str], list[Decoded]]]:
    batches = [paths[start : start + batch_size] for start in range(0, len(paths), batch_size)]
    with ThreadPoolExecutor(DECODERS) as threads:
        waiting = (threads.map(lambda path: decode_file(Path(path), size), batch) for batch in batches)
        ahead = list(islice(waiting, 1))
        for batch in batches:
            ahead += islice(waiting, 1)
            yield batch, list(ahead.pop(0))


@torch.inference_mode()
def answer(ensemble: Ensemble, images_NHWC: NDArray[np.uint8]) -> Iterator[Row]:
    outputs = ensemble(torch.from_numpy(images_NHWC).to(ensemble.scale_C11.device))
    names = [ensemble.about.class_names[label] for label in outputs["label"].tolist()]
    columns = [outputs[name].tolist() for name in COLUMNS]
    classes = ensemble.about.class_names
    shares = [dict(zip(classes, row, strict=True)) for row in outputs["probabilities"].tolist()]
    keys = ("label", *COLUMNS, "probabilities")
    return (dict(zip(keys, values, strict=True)) for values in zip(names, *columns, shares, strict=True))


def write(rows: Iterator[list[Row]], total: int, layout: Callable[[Row], str], stream: TextIO) -> int:
    """Returns how many images could be read."""
    progress, done, predicted = Progress(total, "images", stream=sys.stderr), 0, 0
    with contextlib.suppress(BrokenPipeError):  # the reader closed the pipe, as `| head` does
        for batch in rows:
            progress.clear()
            print("\n".join(map(layout, batch)), file=stream, flush=True)
            done += len(batch)
            predicted += sum("error" not in row for row in batch)
            progress.show(done)
        progress.clear()
        if not predicted:
            raise ValueError(f"no image could be read: {printable(batch[-1]['path'])}: {batch[-1]['error']}")
    return predicted


class Table:
    """Formats a table row by row; paths and class names, known in advance, set the column widths."""

    def __init__(self, paths: Sequence[str], class_names: Sequence[str]):
        self.path_width = max(len(printable(path)) for path in paths)
        self.label_width = max(len(name) for name in (*class_names, "label"))

    @property
    def header(self) -> str:
        titles = "  ".join(name.replace("_", " ") for name in COLUMNS)
        return f"{'path':{self.path_width}}  {'label':{self.label_width}}  {titles}"

    def __call__(self, row: Row) -> str:
        path = f"{printable(row['path']):{self.path_width}}"
        if "error" in row:
            return f"{path}  error: {row['error']}"
        figures = "  ".join(f"{row[name]:{len(name)}.3f}" for name in COLUMNS)
        return f"{path}  {printable(row['label']):{self.label_width}}  {figures}"
