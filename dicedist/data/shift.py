"""Shifted test images with labels: corruptions of the test set, the official CIFAR-C, or any folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dicedist.cluster.heartbeat import advance
from dicedist.config.schema import RGB
from dicedist.data.corruptions import BLOCK, CORRUPTIONS, EXTRA, SEVERITIES, corrupt
from dicedist.data.images import shrink_and_crop
from dicedist.data.prepared import NewArray, home, prepare
from dicedist.data.sets.folder import decode_sound, scan
from dicedist.data.sources import Source, Split, part, some_of_each

VERSION = 2  # increase it when an operator changes, because corrupted images are cached
KINDS = {  # shift=KIND -> the operators of corruptions.py
    "corruptions": list(CORRUPTIONS),
    "corruptions_extra": list(EXTRA),
    "rotations": ["rotation"],
    "resolutions": ["resolution"],
}
OFFICIAL = "cifar_c"
OFFICIAL_FOLDERS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}


@dataclass(frozen=True)
class Shift:
    """The clean test images, and the shifted sets, one after another."""

    clean: Split | None  # None: the shifted images are not made from the test set
    names: list[str]
    severities: list[int]
    sets: Iterator[tuple[str, int, Split]]  # name, severity, images


def open_shift(
    kind: str, severities: Sequence[int], limit: int | None, source: Source, root: str | Path | None
) -> Shift:
    """Open shifted images. Every rank calls this; the first process of a node makes missing images.

    kind: one of KINDS, cifar_c, or a folder with a folder of images for each class. limit: number of test images.
    """
    refuse_severities(severities)
    if source.kind != "images":
        raise ValueError(f"shift={kind}: this shift needs images, but the run learned {source.kind}")
    if kind in (*KINDS, OFFICIAL) and source.shape[0] != RGB:
        raise ValueError(f"shift={kind}: it needs RGB, but the run learned images of {source.shape[0]} channels")
    levels = sorted(set(severities))
    if kind == OFFICIAL:
        return official(levels, limit, source, Path(root).expanduser() if root else home())
    if kind in KINDS:
        rows_N = some_of_each(source.test.labels_N, limit or len(source.test))
        clean = part(source.test, rows_N)
        sets = ((name, level, corrupted(clean, name, level, source)) for name in KINDS[kind] for level in levels)
        return Shift(clean, KINDS[kind], levels, sets)
    folder = Path(kind).expanduser()
    if not folder.is_dir():
        known = ", ".join([*KINDS, OFFICIAL])
        raise ValueError(f"shift={kind}: there is no such folder; write one of {known}, or a folder of class folders")
    return Shift(None, [folder.name], [1], iter([(folder.name, 1, labeled(folder, source))]))


def refuse_severities(severities: Sequence[int]) -> None:
    if not severities or not set(severities) <= set(SEVERITIES):
        raise ValueError(f"shift_severities={list(severities)}: write some of [1, 2, 3, 4, 5]")


def corrupted(clean: Split, name: str, severity: int, source: Source) -> Split:
    """Corrupt the images once, and cache the result with the prepared images."""

    def build(new_array: NewArray) -> dict[str, Any]:
        out_NHWC = new_array("images", (len(clean), source.size, source.size, RGB), np.uint8)
        for start in range(0, len(clean), 8 * BLOCK):
            rows_B = torch.arange(start, min(start + 8 * BLOCK, len(clean)))
            out_NHWC[rows_B.numpy()] = corrupt(clean.take(rows_B).numpy(), name, severity, start)
            advance()
        return {}

    kept = prepare(f"{name}-{severity}", home(), [], build, source.data_digest, len(clean), VERSION)
    return Split(torch.from_numpy(kept.array("images")), clean.labels_N)


def official(severities: Sequence[int], limit: int | None, source: Source, root: Path) -> Shift:
    """Open the published .npy files: 10,000 images for each severity in turn, in the order of the test set."""
    if source.name not in OFFICIAL_FOLDERS:
        raise ValueError(f"shift=cifar_c is made of CIFAR, and the run learned {source.name}: write shift=corruptions")
    folder = root / OFFICIAL_FOLDERS[source.name]
    names = [name for name in (*CORRUPTIONS, *EXTRA) if (folder / f"{name}.npy").is_file()]
    if not names or not (folder / "labels.npy").is_file():
        raise ValueError(f"shift=cifar_c: put the folder {folder.name} with its .npy files into {root}")
    labels = read_official(folder / "labels.npy", (50_000,))
    # data.test_limit may have left some test images out.
    rows = np.asarray(torch.arange(10_000) if source.test.rows_N is None else source.test.rows_N)[:limit]

    def sets() -> Iterator[tuple[str, int, Split]]:
        for name in names:
            images = read_official(folder / f"{name}.npy", (50_000, 32, 32, 3))
            for severity in severities:
                chosen = (severity - 1) * 10_000 + rows
                labels_N = torch.from_numpy(labels[chosen].astype(np.int64))
                yield name, severity, Split(torch.from_numpy(np.ascontiguousarray(images[chosen])), labels_N)

    return Shift(part(source.test, torch.arange(len(rows))), names, list(severities), sets())


def read_official(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
        raise ValueError(f"{path} is damaged: fetch it again") from error
    if array.shape != shape:
        raise ValueError(f"{path} has the shape {list(array.shape)}, and CIFAR-C's has {list(shape)}: fetch it again")
    return array


def labeled(folder: Path, source: Source) -> Split:
    """Load a folder of class folders. They have the names of the run's classes; a class may be missing."""
    try:
        class_names, found = scan(folder)
    except ValueError as error:
        raise ValueError(f"shift={folder}: images need labels, so write a folder with a folder per class") from error
    if unknown := sorted(set(class_names) - set(source.class_names)):
        known = ", ".join(source.class_names[:5])
        raise ValueError(f"shift={folder}: {unknown[0]} is no class of the run ({known}, ...)")
    channels, size, _ = source.shape
    images_NHWC, kept = decode_sound(folder, [folder / path for path, _ in found], size, channels, shrink_and_crop)
    labels = [source.class_names.index(class_names[found[place][1]]) for place in kept]
    return Split(torch.from_numpy(images_NHWC), torch.tensor(labels))
