"""DALI: prefetches the same views as TorchPipeline, and decodes image folders. Imported only where it is used.

Legend: B batch, H rows, W columns, C colours.
"""

import contextlib
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types
from torch import Tensor

from dicedist.config.schema import DataConfig
from dicedist.data.order import padding
from dicedist.data.pipeline import RawBatch
from dicedist.data.sets.folder import is_unfit
from dicedist.data.sources import Source

PREFETCH = 2  # batches made ahead of the one in use


class DaliPipeline:
    def __init__(self, config: DataConfig, source: Source, batch_size: int, device: torch.device):
        self.config, self.source, self.device = config, source, device
        self.raw: Iterator[RawBatch] = iter(())
        gpu = None if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
        self.pipe = Pipeline(batch_size, config.num_threads, gpu, prefetch_queue_depth=PREFETCH)
        with self.pipe:
            self.pipe.set_outputs(self.graph())
        self.pipe.build()

    def graph(self) -> object:
        num_outputs = 5 if self.config.augment == "cutout" else 4
        images, left, top, flips, *cutout = fn.external_source(
            source=self.feed, num_outputs=num_outputs, layout=["HWC"]
        )
        if self.device.type == "cuda":
            images = images.gpu()
        views = fn.crop_mirror_normalize(
            images,
            crop=(self.config.size, self.config.size),
            crop_pos_x=left,
            crop_pos_y=top,
            mirror=flips,
            mean=[255 * mean for mean in self.source.mean],
            std=[255 * std for std in self.source.std],
            dtype=types.DALIDataType.FLOAT,
            output_layout="HWC",  # the memory layout of torch's channels_last
        )
        if not cutout:
            return views
        side = float(self.config.cutout_size)
        return fn.erase(views, anchor=cutout[0], shape=[side, side], axes=(0, 1), fill_value=0.0)

    def feed(self) -> tuple[NDArray, ...]:
        """One batch for DALI, with black borders: the crop operator only takes positions inside the image, in 0..1."""
        images_BHWC, (starts_B2, flips_B, cutout_B2) = next(self.raw)
        reach = padding(self.config.size)
        padded = torch.nn.functional.pad(images_BHWC, (0, 0, reach, reach, reach, reach))
        top_B, left_B = ((starts_B2 + reach) / (2 * reach)).unbind(1)
        # numpy, because DALI asks the CUDA driver about every torch tensor, even where there is no driver
        fed = [padded.numpy(), left_B.contiguous().numpy(), top_B.contiguous().numpy(), flips_B.int().numpy()]
        if cutout_B2 is not None:
            fed.append((cutout_B2 - self.config.cutout_size // 2).float().numpy())
        return tuple(fed)

    def stream(self, raw: Iterable[RawBatch]) -> Generator[Tensor, None, None]:
        """Only one stream at a time: a new one discards what was prefetched for an abandoned one."""
        self.raw = iter(())
        while self.run() is not None:
            pass
        self.pipe.reset()
        mine = self.raw = iter(raw)
        while (views_BHWC := self.run()) is not None:
            yield views_BHWC.permute(0, 3, 1, 2)
            assert self.raw is mine, "this stream was given up for another"

    def run(self) -> Tensor | None:
        # Bound to torch's stream, so that DALI does not reuse the memory before the kernels that read it have run.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            (views,) = self.pipe.run(stream)
        except StopIteration:
            return None
        return torch.from_dlpack(views.as_tensor())


def decode(batches: Sequence[Sequence[Path]], size: int, num_threads: int) -> Iterator[NDArray[np.uint8] | None]:
    """For each batch of files, its images [B, size, size, 3], or None if one of the files cannot be decoded."""
    done = 0
    while done < len(batches):
        pipe = _decoder(iter(batches[done:]), max(map(len, batches)), size, num_threads)
        try:
            while done < len(batches):
                with silence():
                    (images,) = pipe.run()
                yield np.asarray(images.as_cpu().as_tensor())
                done += 1
        except (RuntimeError, OSError):  # a pipeline is no longer valid after an error
            yield None
            done += 1


def read_file(path: Path) -> NDArray[np.uint8]:
    if is_unfit(path):
        raise OSError(f"{path} is not for DALI")  # the batch goes to PIL, which says why
    return np.fromfile(path, np.uint8)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """DALI prints its own lines about a file that it cannot decode, past Python; dicedist tells of it in one."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _decoder(batches: Iterator[Sequence[Path]], batch_size: int, size: int, num_threads: int) -> Pipeline:
    gpu = int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else None
    pipe = Pipeline(batch_size, num_threads, gpu, prefetch_queue_depth=PREFETCH)
    with pipe:
        files = fn.external_source(source=lambda: [read_file(path) for path in next(batches)])
        images = fn.decoders.image(files, device="cpu" if gpu is None else "mixed", output_type=types.DALIImageType.RGB)
        small: Any = fn.resize(images, size=[size, size], mode="not_smaller", subpixel_scale=False)
        pipe.set_outputs(fn.crop(small, crop=(size, size)))
    pipe.build()
    return pipe
