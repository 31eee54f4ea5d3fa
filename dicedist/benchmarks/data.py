"""Images per second of DALI, torch, and the DataLoader with torchvision transforms that most trainers use."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from dicedist.cluster.devices import pick_device
from dicedist.config import Config
from dicedist.config.schema import RGB, DataConfig
from dicedist.data import sources, uses_dali
from dicedist.data.augmentation import padding
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source
from dicedist.training.forecast import now_done

SPELL, ROUNDS = 0.5, 5  # SPELL: seconds of one measurement of a pipeline


def data(config: Config) -> list[dict[str, Any]]:
    if config.data.name in ("files", "shards"):
        raise ValueError(
            f"bench data measures images in memory: write bench files data=files data.root={config.data.root}"
        )
    if config.data.channels != RGB:
        raise ValueError(f"data.channels={config.data.channels}: bench data compares RGB images, leave it out")
    source = sources.load(config.data)
    return [row for threads in (1, 2) for row in throughput(source, config, threads)]


def throughput(source: Source, config: Config, threads: int) -> list[dict[str, Any]]:
    """Return one row per pipeline, on the same training images, with one core per thread; to a GPU if there is one.

    The pipelines take turns, and the median of the rounds counts, so that a busy machine affects all of them equally.
    """
    with cores(threads):
        streams = {
            name: our_sizes(source, replace(config.data, pipeline=name, num_threads=threads), config.batch_size)
            for name in pipelines(config.data)
        }
        workers = threads if threads > 1 else 0
        loader = DataLoader(Transformed(source), config.batch_size, shuffle=True, num_workers=workers)
        streams["dataloader"] = their_sizes(loader)
        turns = [{name: images_per_second(sizes, SPELL) for name, sizes in streams.items()} for _ in range(ROUNDS)]
    rows = []
    for name in streams:
        speed, theirs = (median(turn[one] for turn in turns) for one in (name, "dataloader"))
        times = speed / theirs
        rows.append({"pipeline": name, "threads": threads, "images_per_second": speed, "times_dataloader": times})
    return rows


def pipelines(config: DataConfig) -> list[str]:
    return ["dali", "torch"] if uses_dali(replace(config, pipeline="auto")) else ["torch"]


def images_per_second(sizes: Iterator[int], seconds: float) -> float:
    next(sizes), next(sizes), next(sizes)  # start threads, fill queues
    images, began = 0, now_done(pick_device())
    while time.monotonic() - began < seconds:
        images += next(sizes)
    return images / (now_done(pick_device()) - began)


def our_sizes(source: Source, config: DataConfig, batch_size: int) -> Iterator[int]:
    """Yield the sizes of an endless stream of batches."""
    ours = Loader(source.train, config, source, batch_size, 0, pick_device(), [0])
    return (len(batch.labels_B) for batch in ours.endless())


def their_sizes(loader: DataLoader) -> Iterator[int]:
    while True:
        yield from (len(labels_B) for _, labels_B in loader)


class Transformed(Dataset[tuple[Tensor, Tensor]]):
    """The usual Dataset: one image at a time, through PIL."""

    def __init__(self, source: Source):
        self.images_NHWC, self.labels_N = source.train.images_NHWC.numpy(), source.train.labels_N
        self.transform = transforms.Compose([
            transforms.RandomCrop(source.size, padding=padding(source.size)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(source.mean, source.std),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(Image.fromarray(self.images_NHWC[index])), self.labels_N[index]


@contextlib.contextmanager
def cores(number: int) -> Iterator[None]:
    """Limit this thread, and threads that it starts, to `number` cores, and switch torch's own threads off."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, sorted(allowed)[:number])
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if allowed:
            os.sched_setaffinity(0, allowed)
