"""CIFAR-10 and CIFAR-100, read by torchvision after every file was verified against its published md5."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dicedist.data.prepared import NewArray, Prepared, one_process, prepare, refuse_unwritable
from dicedist.data.reading import SPLITS

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}
SECONDS_TO_ANSWER = 30


def prepare_cifar(name: str, root: Path, download: bool) -> Prepared:
    kind = torchvisions(name)
    files = [root / kind.base_folder / file for file in published(kind)]
    if not all(file.exists() for file in files):
        fetch(name, kind, root, files, download)

    def build(new_array: NewArray) -> dict[str, Any]:
        refuse_damaged(root, kind)
        for split in SPLITS:
            dataset = kind(root, train=split == "train")
            new_array(f"{split}_images", dataset.data.shape, np.uint8)[:] = dataset.data
            new_array(f"{split}_labels", (len(dataset),), np.int64)[:] = dataset.targets
        return {"class_names": dataset.classes, "mean": MEAN[name], "std": STD[name]}

    return prepare(name, root, files, build)


def torchvisions(name: str) -> type["CIFAR10"]:
    """Import torchvision late: this takes two seconds, and a refused command should not wait for it."""
    from torchvision import datasets

    return {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]


def published(kind: type["CIFAR10"]) -> dict[str, str]:
    """Return the published md5 of each file."""
    return {**dict(kind.train_list), **dict(kind.test_list), kind.meta["filename"]: kind.meta["md5"]}


def refuse_damaged(root: Path, kind: type["CIFAR10"]) -> None:
    """Refuse damaged files before any file is unpickled, because a pickle can execute code."""
    from torchvision.datasets.utils import check_integrity

    for file, md5 in published(kind).items():
        path = root / kind.base_folder / file
        if not check_integrity(path, md5):
            raise ValueError(f"{path}: damaged, its md5 is not {md5}; delete it and run again with data.download=true")


def fetch(name: str, kind: type["CIFAR10"], root: Path, files: list[Path], download: bool) -> None:
    advice = f"put the folder {kind.base_folder} into {root}, or write data=shapes, which needs no files"
    if not download:
        raise ValueError(f"{name} is not in {root}: write data.download=true, or {advice}")
    refuse_unwritable(root, advice)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (
            one_process(root / f".{name}.lock", f"download {name}"),
            tempfile.TemporaryDirectory(prefix=f".{name}-partial-", dir=root) as partial,
        ):
            if all(file.exists() for file in files):
                return
            with patience(SECONDS_TO_ANSWER):
                kind(partial, download=True)  # checks the archive's md5 before it unpacks
            (root / kind.base_folder).mkdir(exist_ok=True)
            for file in files:
                os.replace(Path(partial) / file.relative_to(root), file)
    except Exception as error:  # network, disk, permissions and archive raise different errors
        raise ValueError(f"{name} could not be downloaded ({error}): {advice}") from error


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


SETS = dict.fromkeys(FOLDERS, lambda config, root: prepare_cifar(config.name, root, config.download))
