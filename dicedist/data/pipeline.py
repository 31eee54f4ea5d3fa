"""Batches for the members of this rank: images, crops and flips in, or vectors and noise; normalised tensors out.

    order.py       indices, crops, flips of (seed, epoch, step)  ──┐
    sources.py     uint8 images, one copy on a node  ──────────────┴─ RawBatch ── TorchPipeline | DaliPipeline ── views

Both pipelines are the same pure function of a RawBatch, up to float rounding. Vectors have one of their own.

Legend: B batch, H rows, W columns, S either of the two, C colours, V values of a vector.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dicedist.algorithm.batch import Batch, share
from dicedist.algorithm.randomness import generator
from dicedist.config.schema import DataConfig
from dicedist.data import colours, uses_dali
from dicedist.data.encoded import Boxes, Encoded
from dicedist.data.images import resized
from dicedist.data.order import (
    Augmentation,
    augmentation,
    balanced_order,
    batch_indices,
    checksum,
    noise,
    num_batches,
    padding,
    resized_crops,
)
from dicedist.data.sources import Source, Split

CACHED = 2**18  # pixels' colours that are normalised at a time: as floats they stay in a core's cache


class RawBatch(NamedTuple):
    images_BHWC: Tensor
    augmentation: Augmentation


class RawVectors(NamedTuple):
    vectors_BV: Tensor
    noise_BV: Tensor | None


class RawEncoded(NamedTuple):
    """Nothing is read yet: whoever decodes it reads it, ahead of the step."""

    images: Encoded
    rows_B: Tensor
    augmentation: Augmentation

    @property
    def boxes_B4(self) -> Boxes:
        return self.images.boxes(self.rows_B, self.augmentation.crops_B4)


class Pipeline(Protocol):
    def stream(self, raw: Iterable[Any]) -> Generator[Tensor, None, None]:
        """One view for each RawBatch, RawEncoded or RawVectors."""


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
        self.replica, self.replicas, self.vectors = replica, replicas, source.kind == "vectors"
        self.viewers: list[int | None] = [*members] if config.per_member else [None] * bool(members)
        self.pipeline = pipeline_for(config, source, batch_size, device) if members else None
        self.mean_C11, self.std_C11 = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (source.mean, source.std))
        self.balanced = functools.lru_cache(2)(lambda epoch: balanced_order(seed, epoch, split.labels_N))

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
                    [self.disturbed(next(views), epoch, step, len(everyone), rows, member) for member in self.viewers],
                )

    def raw_batches(self, epoch: int, steps: Iterable[int]) -> Iterator[RawBatch | RawEncoded | RawVectors]:
        """The pipeline reads these ahead of the caller's current step."""
        encoded = self.split.inputs_R if isinstance(self.split.inputs_R, Encoded) else None
        for step in steps:
            indices_B = self.indices(epoch, step)
            size, rows = len(indices_B), self.rows(len(indices_B))
            inputs_B = torch.empty(0) if encoded else self.split.take(indices_B[rows])
            for member in self.viewers:
                where = (self.seed, epoch, step)
                if encoded:
                    drawn = resized_crops(*where, size, self.config, member)
                    yield RawEncoded(encoded, self.split.rows_of(indices_B[rows]), drawn.of(rows))
                elif self.vectors:
                    noise_BV = noise(*where, (size, inputs_B.shape[1]), self.config, member)
                    yield RawVectors(inputs_B, None if noise_BV is None else noise_BV[rows])
                else:
                    yield RawBatch(inputs_B, augmentation(*where, size, self.config, member).of(rows))

    def disturbed(self, view_BCHW: Tensor, epoch: int, step: int, size: int, rows: slice, member: int | None) -> Tensor:
        """Colours are drawn like crops, noise is the same for all members; both for the batch, whoever sees a row."""
        if self.vectors:
            return view_BCHW
        if set(colours.NAMES) & set(self.config.augmentations):
            where = (epoch, step) if member is None else (epoch, step, member)
            drawn = colours.draw(self.config.augmentations, size, self.seed, *where).of(rows)
            view_BCHW = colours.apply(view_BCHW, drawn, self.mean_C11, self.std_C11)
        if not self.config.noise:
            return view_BCHW
        draws = generator(self.device, self.seed, "pixels", epoch, step)
        drawn_BCHW = torch.randn((size, *view_BCHW.shape[1:]), generator=draws, device=self.device)[rows]
        return torch.addcdiv(view_BCHW, drawn_BCHW, self.std_C11, value=self.config.noise)

    def indices(self, epoch: int, step: int) -> Tensor:
        if self.config.balance:
            return self.balanced(epoch)[step * self.batch_size :][: self.batch_size]
        return batch_indices(self.seed, epoch, step, len(self.split), self.batch_size)

    def rows(self, size: int) -> slice:
        return share(size, self.replicas, self.replica)

    def close(self) -> None:
        """Ends DALI's threads and frees its memory."""
        self.pipeline = None


def pipeline_for(config: DataConfig, source: Source, batch_size: int, device: torch.device) -> Pipeline:
    if source.kind == "vectors":
        return VectorPipeline(source, device)
    encoded = isinstance(source.train.inputs_R, Encoded)
    if device.type in ("cpu", "cuda") and uses_dali(config):
        from dicedist.data.dali import DaliBoxes, DaliDecoder, DaliPipeline

        decoder = DaliBoxes if device.type == "cpu" else DaliDecoder
        return (decoder if encoded else DaliPipeline)(config, source, batch_size, device)
    return (TorchDecoder if encoded else TorchPipeline)(config, source, device)


class VectorPipeline:
    def __init__(self, source: Source, device: torch.device):
        self.device, self.standardise = device, Standardise(source, device)

    def stream(self, raw: Iterable[RawVectors]) -> Generator[Tensor, None, None]:
        for vectors_BV, noise_BV in raw:
            views_BV = self.standardise(to_device(vectors_BV, self.device))
            yield views_BV if noise_BV is None else views_BV.add_(to_device(noise_BV, self.device))


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
        starts_B2, flips_B = (to_device(drawn, self.device) for drawn in raw.augmentation[:2])
        return self.finish(self.crop(images_BHWC, starts_B2, flips_B), raw.augmentation.cutout_B2)

    def finish(self, cropped_BHWC: Tensor, cutout_B2: Tensor | None) -> Tensor:
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


class TorchDecoder(TorchPipeline):
    """Reads and decodes encoded images, always ahead of the step: at least one thread does nothing else."""

    def __init__(self, config: DataConfig, source: Source, device: torch.device):
        super().__init__(config, source, device)
        self.num_threads, self.size = config.num_threads, config.size

    def view(self, raw: RawEncoded) -> Tensor:  # type: ignore[override]
        decoded = map(raw.images.decoded, raw.rows_B.tolist(), raw.boxes_B4.tolist())
        return self.views(map(torch.from_numpy, decoded), raw.augmentation)

    def views(self, boxes: Iterable[Tensor], drawn: Augmentation) -> Tensor:
        """Of decoded boxes [h, w, 3] of any size. One after another: an image fits into the cache, a batch does not."""
        squares = (resized(box_HWC, self.size) for box_HWC in boxes)
        flipped = [
            square.flip(1) if flip else square for square, flip in zip(squares, drawn.flips_B.tolist(), strict=True)
        ]
        return self.finish(to_device(torch.stack(flipped), self.device), drawn.cutout_B2)


class Standardise:
    """float32 [B, V] -> float32 [B, V] with mean 0 and deviation 1 over the training rows."""

    def __init__(self, source: Source, device: torch.device):
        std_V, mean_V = (torch.tensor(x, dtype=torch.float64) for x in (source.std, source.mean))
        self.scale_V, self.shift_V = (1 / std_V).float().to(device), (-mean_V / std_V).float().to(device)

    def __call__(self, vectors_BV: Tensor) -> Tensor:
        return vectors_BV * self.scale_V + self.shift_V


class Normalise:
    """uint8 [B, H, W, C] -> float32 [B, C, H, W], channels_last."""

    def __init__(self, source: Source, device: torch.device):
        std, mean = (torch.tensor(x, dtype=torch.float64) for x in (source.std, source.mean))
        # Repeated along a row of pixels, because an inner loop over three colours would be three times slower.
        self.scale_WC = (1 / (255 * std)).float().repeat(source.size).to(device)
        self.shift_WC = (-mean / std).float().repeat(source.size).to(device)

    def __call__(self, images_BHWC: Tensor) -> Tensor:
        rows = images_BHWC.view(-1, len(self.scale_WC))
        views = torch.empty(rows.shape, device=rows.device)
        at_once = len(rows) if rows.is_cuda else max(1, CACHED // len(self.scale_WC))
        for some, normalised in zip(rows.split(at_once), views.split(at_once), strict=True):
            torch.mul(some, self.scale_WC, out=normalised).add_(self.shift_WC)
        return views.view(images_BHWC.shape).permute(0, 3, 1, 2)


def evaluation_batches(
    split: Split, source: Source, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images [B, C, H, W] or vectors [B, V] as they are, and labels [B], in the order of the split."""
    normalise = (Standardise if source.kind == "vectors" else Normalise)(source, device)
    for start in range(0, len(split), batch_size):
        indices_B = torch.arange(start, min(start + batch_size, len(split)))
        yield normalise(to_device(split.take(indices_B), device)), to_device(split.labels_N[indices_B], device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Does not wait: a copy to a GPU is queued, and torch keeps the pinned memory until it is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
