"""Images a second: DALI, torch, and the DataLoader of torchvision transforms that most trainers of CIFAR use."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from dicedist.data import DataConfig, uses_dali
from dicedist.data.order import padding
from dicedist.data.pipeline import Batch, Loader
from dicedist.data.sources import Source, Split

CPU = torch.device("cpu")


def data_throughput(
    source: Source, config: DataConfig, batch_size: int, num_threads: Sequence[int] = (1, 2), seconds: float = 3.0
) -> list[dict[str, Any]]:
    """A row for each pipeline and number of threads, each held to as many cores, on the same training images.

    The median of the rounds is reported, so that a busy machine disturbs one round and not the figure.
    """
    rows = []
    pipelines = ["dali", "torch", "dataloader"] if uses_dali(dataclasses.replace(config, pipeline="auto")) else ["torch", "dataloader"]
    for threads in num_threads:
        with cores(threads):
            speeds = {name: measure(batches(name, threads, source, config, batch_size), seconds) for name in pipelines}
        rows += [
            {
                "pipeline": name,
                "threads": threads,
                "images_per_second": round(speed),
                "times_dataloader": round(speed / speeds["dataloader"], 1),
            }
            for name, speed in speeds.items()
        ]
    return rows


def batches(name: str, threads: int, source: Source, config: DataConfig, batch_size: int) -> Iterator[int]:
    """Number of images of each batch, for ever."""
    if name == "dataloader":
        workers = 0 if threads == 1 else threads
        loader: Iterable[tuple[Tensor, Tensor]] = DataLoader(
            Transformed(source.train, source), batch_size, shuffle=True, num_workers=workers
        )
        while True:
            yield from (len(labels_B) for _, labels_B in loader)
    config = dataclasses.replace(config, pipeline=name, num_threads=threads)
    ours = Loader(source.train, config, source, batch_size, 0, CPU, [0])
    epoch = 0
    while True:
        yield from (len(batch.labels_B) for batch in ours.epoch(epoch))
        epoch += 1
