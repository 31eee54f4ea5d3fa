"""Batches for the members of this rank: images, crops and flips in, normalised tensors out.

    order.py       indices, crops, flips of (seed, epoch, step)  ──┐
    sources.py     uint8 images, one copy on a node  ──────────────┴─ RawBatch ── TorchPipeline | DaliPipeline ── views

Both pipelines are the same pure function of a RawBatch, up to float rounding.

Legend: B batch, H rows, W columns, S either of the two, C colours.
"""

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dicedist.algorithm.batch import Batch, share
from dicedist.config.schema import DataConfig
from dicedist.data import uses_dali
from dicedist.data.order import Augmentation, augmentation, batch_indices, checksum, num_batches, padding
from dicedist.data.sources import Source, Split


class RawBatch(NamedTuple):
    images_BHWC: Tensor
    augmentation: Augmentation


class Pipeline(Protocol):
    def stream(self, raw: Iterable[RawBatch]) -> Generator[Tensor, None, None]: ...


class Loader:
    """Batches of a split for the members hosted on this rank; a rank without members gets only labels and checksums."""

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        source: Source,
        batch_size: int,
        seed: int,
        device: torch.device,
        members: Sequence[int],
        replica: int = 0,
        replicas: int = 1,
    ):
        self.split, self.config, self.batch_size, self.seed, self.device = split, config, batch_size, seed, device
        self.replica, self.replicas = replica, replicas
        self.viewers: list[int | None] = [*members] if config.per_member else [None] * bool(members)
        self.pipeline = pipeline_for(config, source, batch_size, device) if members else None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches from step `start` on, exactly those of an uninterrupted epoch."""
        steps = range(start, num_batches(len(self.split), self.batch_size))
        with contextlib.ExitStack() as stack:
            views: Iterator[Tensor] = iter(())
            if self.pipeline is not None:
                views = stack.enter_context(contextlib.closing(self.pipeline.stream(self.raw_batches(epoch, steps))))
            for step in steps:
                everyone = self.indices(epoch, step)
                rows = self.rows(len(everyone))
                indices_B = everyone[rows]
                yield Batch(
                    epoch,
                    step,
                    len(everyone),
                    rows,
                    indices_B,
                    to_device(self.split.labels_N[indices_B], self.device),
                    checksum(everyone, epoch, step),
                    [next(views) for _ in self.viewers],
                )

    def raw_batches(self, epoch: int, steps: Iterable[int]) -> Iterator[RawBatch]:
        """The pipeline reads these ahead of the caller's current step."""
        for step in steps:
            indices_B = self.indices(epoch, step)
            rows = self.rows(len(indices_B))
            images_BHWC = self.split.take(indices_B[rows])
            for member in self.viewers:
                drawn = augmentation(self.seed, epoch, step, len(indices_B), self.config, member)
                yield RawBatch(images_BHWC, drawn.of(rows))

    def indices(self, epoch: int, step: int) -> Tensor:
        return batch_indices(self.seed, epoch, step, len(self.split), self.batch_size)

    def rows(self, size: int) -> slice:
        return share(size, self.replicas, self.replica)

    def close(self) -> None:
        """Ends DALI's threads and frees its memory."""
        self.pipeline = None


def pipeline_for(config: DataConfig, source: Source, batch_size: int, device: torch.device) -> Pipeline:
    if device.type in ("cpu", "cuda") and uses_dali(config):
        from dicedist.data.dali import DaliPipeline

        return DaliPipeline(config, source, batch_size, device)
    return TorchPipeline(config, source, device)


class TorchPipeline:
    """Runs on the CPU in the calling thread, or ahead in other threads; on CUDA it is queued after the images' copy."""

    def __init__(self, config: DataConfig, source: Source, device: torch.device):
        self.device = device
        self.normalise = Normalise(source, device)
        self.reach = padding(config.size)
        self.pixels = torch.arange(config.size, dtype=torch.int32, device=device)
        self.cutout_size = config.cutout_size
        self.num_threads = config.num_threads if device.type == "cpu" and config.num_threads > 1 else 0

    def stream(self, raw: Iterable[RawBatch]) -> Generator[Tensor, None, None]:
        if not self.num_threads:
            yield from map(self.view, raw)
            return
        with ThreadPoolExecutor(self.num_threads) as threads:
            ahead: deque[Future[Tensor]] = deque()
            for batch in raw:
                ahead.append(threads.submit(self.view, batch))
                if len(ahead) > self.num_threads:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

    def view(self, raw: RawBatch) -> Tensor:
        images_BHWC = to_device(raw.images_BHWC, self.device)
        starts_B2, flips_B, cutout_B2 = raw.augmentation
        cropped_BHWC = self.crop(images_BHWC, to_device(starts_B2, self.device), to_device(flips_B, self.device))
        views_BCHW = self.normalise(cropped_BHWC)
        return views_BCHW if cutout_B2 is None else self.cut(views_BCHW, to_device(cutout_B2, self.device))

    def crop(self, images_BHWC: Tensor, starts_B2: Tensor, flips_B: Tensor) -> Tensor:
        """Crops and flips with a single gather of pixels from images with a black border."""
        batch, reach = len(images_BHWC), self.reach
        side = images_BHWC.shape[1] + 2 * reach
        padded = torch.nn.functional.pad(images_BHWC, (0, 0, reach, reach, reach, reach))
        columns_BW = torch.where(flips_B[:, None], self.pixels.flip(0), self.pixels) + starts_B2[:, 1:] + reach
        rows_BH = self.pixels + starts_B2[:, :1] + reach
        rows_BH += side * torch.arange(batch, dtype=torch.int32, device=self.device)[:, None]
        pixels_BHW = side * rows_BH[:, :, None] + columns_BW[:, None, :]
        return padded.view(-1, 3).index_select(0, pixels_BHW.flatten()).view(images_BHWC.shape)

    def cut(self, views_BCHW: Tensor, cutout_B2: Tensor) -> Tensor:
        """Cutout (DeVries & Taylor, 2017): blanks a square with the mean colour, clipped at the border."""
        first_B2 = cutout_B2 - self.cutout_size // 2
        distance_B2S = self.pixels - first_B2[:, :, None]
        inside_B2S = (distance_B2S >= 0) & (distance_B2S < self.cutout_size)
        return views_BCHW.masked_fill_(inside_B2S[:, None, 0, :, None] & inside_B2S[:, None, 1, None, :], 0)


class Normalise:
    """uint8 [B, H, W, C] -> float32 [B, C, H, W], channels_last."""

    def __init__(self, source: Source, device: torch.device):
        std, mean = (torch.tensor(x, dtype=torch.float64) for x in (source.std, source.mean))
        # Repeated along a row of pixels, because an inner loop over three colours would be three times slower.
        self.scale_WC = (1 / (255 * std)).float().repeat(source.size).to(device)
        self.shift_WC = (-mean / std).float().repeat(source.size).to(device)

    def __call__(self, images_BHWC: Tensor) -> Tensor:
        rows = images_BHWC.view(-1, len(self.scale_WC)).float().mul_(self.scale_WC).add_(self.shift_WC)
        return rows.view(images_BHWC.shape).permute(0, 3, 1, 2)


def evaluation_batches(
    split: Split, source: Source, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images [B, C, H, W] without augmentation, and labels [B], in the order of the split."""
    normalise = Normalise(source, device)
    for start in range(0, len(split), batch_size):
        indices_B = torch.arange(start, min(start + batch_size, len(split)))
        yield normalise(to_device(split.take(indices_B), device)), to_device(split.labels_N[indices_B], device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Does not wait: a copy to a GPU is queued, and torch keeps the pinned memory until it is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
