"""Images per second of DALI, torch, and the DataLoader with torchvision transforms that most trainers use."""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from dicedist.config import Config
from dicedist.config.schema import DataConfig
from dicedist.data import sources, uses_dali
from dicedist.data.augmentation import padding
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source

CPU = torch.device("cpu")
SPELL = 0.5  # seconds that a pipeline is measured at a time


def data_throughput(
    source: Source, config: DataConfig, batch_size: int, num_threads: Sequence[int] = (1, 2), rounds: int = 5
) -> list[dict[str, Any]]:
    """One row per pipeline and number of threads, limited to as many cores, on the same training images.

    The pipelines take turns and the median of the rounds counts, so that a busy machine disturbs all of them alike.
    """
    names = ["torch", "dataloader"]
    if uses_dali(dataclasses.replace(config, pipeline="auto")):
        names.insert(0, "dali")
    rows = []
    for threads in num_threads:
        with cores(threads):
            streams = {name: batch_sizes(name, threads, source, config, batch_size) for name in names}
            turns = [
                {name: images_per_second(stream, SPELL) for name, stream in streams.items()} for _ in range(rounds)
            ]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
        for name, speed in medians.items():
            times = speed / medians["dataloader"]
            rows.append({"pipeline": name, "threads": threads, "images_per_second": speed, "times_dataloader": times})
    return rows


def data(config: Config) -> list[dict[str, Any]]:
    if config.data.name in ("files", "shards"):
        raise ValueError(
            f"bench data is of images in memory: write bench files data=files data.root={config.data.root}"
        )
    return data_throughput(sources.load(config.data), config.data, config.batch_size)


def images_per_second(sizes: Iterator[int], seconds: float) -> float:
    next(sizes), next(sizes), next(sizes)  # starts threads, fills queues
    images, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        images += next(sizes)
    return images / passed


def batch_sizes(name: str, threads: int, source: Source, config: DataConfig, batch_size: int) -> Iterator[int]:
    """The sizes of an endless stream of batches."""
    if name == "dataloader":
        workers = threads if threads > 1 else 0
        loader = DataLoader(Transformed(source), batch_size, shuffle=True, num_workers=workers)
        while True:
            yield from (len(labels_B) for _, labels_B in loader)
    ours = Loader(
        source.train, dataclasses.replace(config, pipeline=name, num_threads=threads), source, batch_size, 0, CPU, [0]
    )
    epoch = 0
    while True:
        yield from (len(batch.labels_B) for batch in ours.epoch(epoch))
        epoch += 1


class Transformed(Dataset[tuple[Tensor, Tensor]]):
    """The usual way: one image at a time, through PIL."""

    def __init__(self, source: Source):
        self.images_NHWC, self.labels_N = source.train.images_NHWC.numpy(), source.train.labels_N
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(source.size, padding=padding(source.size)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(source.mean, source.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(Image.fromarray(self.images_NHWC[index])), self.labels_N[index]


@contextlib.contextmanager
def cores(number: int) -> Iterator[None]:
    """Limits this thread and those it starts to `number` cores, and keeps torch's own threads out of the way."""
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
