"""DALI: prefetch the same views as TorchPipeline, and decode image folders. Imported only when it is used.

Legend: B batch, H rows, W columns, C colors.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types
from torch import Tensor

from dicedist.config.schema import DataConfig
from dicedist.data.augmentation import padding, with_border
from dicedist.data.images import open_image
from dicedist.data.pipeline import RawBatch, RawEncoded, TorchPipeline, ahead
from dicedist.data.sources import Source

PREFETCH = 2  # batches made ahead of the one in use


class DaliPipeline:
    described, holds_images = "DALI prepares the images", False

    def __init__(self, config: DataConfig, source: Source, batch_size: int, device: torch.device):
        self.config, self.source, self.device = config, source, device
        self.raw: Iterator[Any] = iter(())
        gpu = None if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
        self.pipe = Pipeline(batch_size, config.num_threads, gpu, prefetch_queue_depth=PREFETCH)
        with self.pipe:
            self.pipe.set_outputs(self.graph())
        self.pipe.build()

    def graph(self) -> object:
        images, left, top, flips = fn.external_source(source=self.feed, num_outputs=4, layout=["HWC"])
        if self.device.type == "cuda":
            images = images.gpu()
        return self.normalized(images, flips, crop=(self.config.size,) * 2, crop_pos_x=left, crop_pos_y=top)

    def normalized(self, images: Any, flips: Any, **crop: Any) -> object:
        return fn.crop_mirror_normalize(
            images,
            **crop,
            mirror=flips,
            mean=[255 * mean for mean in self.source.mean],
            std=[255 * std for std in self.source.std],
            dtype=types.DALIDataType.FLOAT,
            output_layout="HWC",  # the memory layout of torch's channels_last
        )

    def feed(self) -> tuple[Any, ...]:
        """Return a batch for DALI, with black borders: its crops lie inside the image, at positions in 0..1."""
        raw: RawBatch = next(self.raw)
        images_BHWC, drawn = raw
        assert drawn is not None
        padded, reach = with_border(images_BHWC), padding(self.config.size)
        top_B, left_B = ((drawn.starts_B2 + reach) / (2 * reach)).unbind(1)
        # numpy, because DALI asks the CUDA driver about every torch tensor, even on machines without a driver
        return tuple(fed.contiguous().numpy() for fed in (padded, left_B, top_B, drawn.flips_B.int()))

    def stream(self, raw: Iterable[Any]) -> Generator[Tensor, None, None]:
        for views in self.outputs(raw):
            yield torch.from_dlpack(views.as_tensor()).permute(0, 3, 1, 2)

    def outputs(self, raw: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of the graph, each valid until the next. A new stream discards an unfinished one."""
        self.raw = iter(())
        while self.made() is not None:
            pass
        self.pipe.reset()
        mine = self.raw = iter(raw)
        while (made := self.made()) is not None:
            yield made
            assert self.raw is mine, "this stream was given up for another"

    def made(self) -> Any:
        """Return the next output of the graph; None at the end."""
        # Bound to torch's stream, so that DALI does not reuse the memory before the kernels that read it have run.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            (made,) = self.pipe.run(stream)
        except StopIteration:
            return None
        return made


class DaliDecoder(DaliPipeline):
    """Decodes only the boxes of encoded images. Threads of Python read the files ahead."""

    def graph(self) -> object:
        files, starts, shapes, flips = fn.external_source(source=self.feed, num_outputs=4)
        boxes = decoded(files, starts, shapes, "mixed")
        return self.normalized(fn.resize(boxes, size=[self.config.size] * 2, subpixel_scale=False), flips)

    def stream(self, raw: Iterable[Any]) -> Generator[Tensor, None, None]:
        with ThreadPoolExecutor(self.config.num_threads) as threads:
            yield from super().stream(read_ahead(raw, threads))

    def feed(self) -> tuple[Any, ...]:
        """Return the files, the upper left corners of their boxes, the shapes of the boxes, and the flips."""
        raw, files = next(self.raw)
        left_B, top_B, width_B, height_B = raw.boxes_B4.int().numpy().T
        corners_B2, shapes_B2 = np.stack([top_B, left_B], 1), np.stack([height_B, width_B], 1)
        return [file.result() for file in files], corners_B2, shapes_B2, raw.drawn.flips_B.int().numpy()

    def made(self) -> Any:
        try:
            with silence():
                return super().made()
        except RuntimeError as error:
            raise ValueError("DALI cannot decode an image of the last batches: data.pipeline=torch names it") from error


class DaliBoxes(DaliDecoder):
    """On a CPU, DALI decodes the boxes and torch does the rest, a batch ahead: torch resizes five times as fast."""

    def __init__(self, config: DataConfig, source: Source, batch_size: int, device: torch.device):
        self.rest = TorchPipeline(config, source, device)
        super().__init__(config, source, batch_size, device)

    def graph(self) -> object:
        files, starts, shapes = fn.external_source(source=lambda: self.feed()[:3], num_outputs=3)
        return decoded(files, starts, shapes, "cpu")

    def stream(self, raw: Iterable[Any]) -> Generator[Tensor, None, None]:
        raw, later = itertools.tee(raw)
        ready = None
        with ThreadPoolExecutor(self.config.num_threads) as readers, ThreadPoolExecutor(1) as resizer:
            for boxes, batch in zip(self.outputs(read_ahead(raw, readers)), later, strict=False):
                tensors = [torch.from_dlpack(boxes[place]) for place in range(len(boxes))]
                following = resizer.submit(self.rest.view_of_boxes, tensors, batch.drawn)
                if ready is not None:
                    yield ready
                ready = following.result()  # before DALI makes the next output, which overwrites the boxes
            if ready is not None:
                yield ready


def decoded(files: Any, starts: Any, shapes: Any, device: str) -> Any:
    kind = types.DALIImageType.RGB
    return fn.decoders.image_slice(files, device=device, start=starts, shape=shapes, axis_names="HW", output_type=kind)


def read_ahead(raw: Iterable[RawEncoded], threads: ThreadPoolExecutor) -> Iterator[tuple[RawEncoded, list[Future]]]:
    """Yield each batch with the bytes of its files, which threads read while earlier batches are in use."""
    files = ((batch, [threads.submit(batch.images.for_dali, row) for row in batch.rows_B.tolist()]) for batch in raw)
    return ahead(files, PREFETCH)


def decode(batches: Sequence[Sequence[Path]], size: int, num_threads: int) -> Iterator[NDArray[np.uint8] | None]:
    """Yield the images [B, size, size, 3] of each batch of files, or None if one of the files cannot be decoded."""
    done = 0
    while done < len(batches):
        pipe = _decoder(iter(batches[done:]), max(map(len, batches)), size, num_threads)
        try:
            while done < len(batches):
                with silence():
                    (images,) = pipe.run()
                yield np.asarray(images.as_cpu().as_tensor())
                done += 1
        except Exception:  # from DALI, or from open_image; a pipeline is no longer valid after an error
            yield None
            done += 1


def read_file(path: Path) -> NDArray[np.uint8]:
    open_image(path).close()  # DALI would decode an image of any size
    return np.fromfile(path, np.uint8)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide the lines that DALI prints about a file that it cannot decode; dicedist reports the file in one line."""
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
    # Decode nothing ahead: lines about a damaged file would be printed outside of `silence`.
    pipe = Pipeline(batch_size, num_threads, gpu, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
    with pipe:
        files = fn.external_source(source=lambda: [read_file(path) for path in next(batches)])
        images = fn.decoders.image(files, device="cpu" if gpu is None else "mixed", output_type=types.DALIImageType.RGB)
        small: Any = fn.resize(images, size=[size, size], mode="not_smaller", subpixel_scale=False)
        pipe.set_outputs(fn.crop(small, crop=(size, size)))
    pipe.build()
    return pipe
