"""What an ensemble makes of images: class, confidence, disagreement of its members, whether it knows such images.

Examples:
    python -m dicedist.predict run=runs/NAME photo.jpg scans/ 'more/**/*.png'    files, folders, patterns
    find scans -newer last | python -m dicedist.predict run=runs/NAME -          a list of files, one a line
    python -m dicedist.predict run=runs/NAME photos/ format=jsonl output=predictions.jsonl
    python -m dicedist.predict run=runs/NAME photos/ members=student

Images of any format and size: the short side is brought to the size that the run was trained on, the middle is taken.

    confidence     0..1, calibrated by the run's evaluation
    disagreement   0..1, the share of pairs of members that predict different classes
    ood score      0..1, low for images unlike those that the run was trained on

An image that cannot be read is a line that says why. The exit code is 0 if any could be read, 2 if none or refused.
A file whose name looks like key=value is written ./key=value.
"""

import contextlib
import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from dicedist.config import compose_typed, show_help
from dicedist.data.folder import decode_file, find_images
from dicedist.devices import pick_device
from dicedist.ensemble import Ensemble, load_ensemble
from dicedist.evaluate import Trust
from dicedist.tracking import duration, put
from dicedist.world import command, keep_memory

SETTING = re.compile(r"--?\w|[\w.]+=")
COLUMNS = ("confidence", "disagreement", "ood_score")
DECODERS = 4  # threads
Row = dict[str, Any]  # path, and error or the rest
Decoded = NDArray[np.uint8] | str  # an image, or why there is none


@dataclass
class Request:
    run: str | None
    members: Any  # null | [0, 2] | student
    average: str | None
    format: str
    output: str | None
    batch_size: int
    device: str
    network: Trust


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "predict")
        return
    request = compose_typed("predict", [x for x in arguments if SETTING.match(x)], Request)
    check(request)
    paths = named([x for x in arguments if not SETTING.match(x)])
    assert request.run is not None
    ensemble = load_ensemble(Path(request.run), request.members, request.average, trusted=request.network.trusted)
    keep_memory()
    device = pick_device() if request.device == "auto" else torch.device(request.device)
    rows = predict(ensemble.to(device), paths, request.batch_size)
    with open(request.output, "w") if request.output else contextlib.nullcontext(sys.stdout) as stream:
        if request.format == "jsonl":
            write(rows, len(paths), json.dumps, stream)
        else:
            table = Table(paths, ensemble.about.class_names)
            print(table.header, file=stream)
            write(rows, len(paths), table, stream)


def check(request: Request) -> None:
    if request.run is None:
        raise ValueError("write run=runs/NAME and images: files, folders, patterns, or - for a list on standard input")
    for name, known in (("format", ("table", "jsonl")), ("device", ("auto", "cpu", "cuda"))):
        if getattr(request, name) not in known:
            raise ValueError(f"{name}={getattr(request, name)}: write one of {', '.join(known)}")
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch finds no GPU here, write device=cpu")
    if request.batch_size < 1:
        raise ValueError(f"batch_size={request.batch_size}: write a whole number from 1")


def named(arguments: Sequence[str]) -> list[str]:
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
    """A list for each batch, in the order of the paths. The next batch is decoded meanwhile, no more is in memory."""
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
    return (dict(zip(("label", *COLUMNS), values, strict=True)) for values in zip(names, *columns, strict=True))


def write(rows: Iterator[list[Row]], total: int, layout: Callable[[Row], str], stream: TextIO) -> None:
    progress, done, predicted = Progress(total), 0, 0
    with contextlib.suppress(BrokenPipeError):  # whoever reads has enough: | head
        for batch in rows:
            progress.clear()
            print("\n".join(map(layout, batch)), file=stream, flush=True)
            done += len(batch)
            predicted += sum("error" not in row for row in batch)
            progress.show(done)
        progress.clear()
        if not predicted:
            raise ValueError(f"no image could be read: {printable(batch[-1]['path'])}: {batch[-1]['error']}")


class Table:
    """Lines of a table whose later rows are not known yet, but their paths and classes are."""

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
        return f"{path}  {row['label']:{self.label_width}}  {figures}"


def printable(path: str) -> str:
    """A name may hold line breaks, and bytes that are no text."""
    return "".join(character if character.isprintable() else "?" for character in path)


class Progress:
    """On standard error, when it takes long: on a terminal one line, which is written over."""

    def __init__(self, total: int):
        self.total, self.terminal = total, sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else 10) or done == self.total:
            return
        self.shown = now
        left = duration((now - self.began) / done * (self.total - done))
        put(sys.stderr, f"{done:,} of {self.total:,} images, {left} left{'' if self.terminal else chr(10)}")

    def clear(self) -> None:
        if self.terminal:
            put(sys.stderr, "\r\x1b[2K")


if __name__ == "__main__":
    command(run)
