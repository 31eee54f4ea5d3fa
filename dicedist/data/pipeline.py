"""Batches for the members of this rank: rows of a source and draws in, normalized tensors out.

    order.py           indices of (seed, epoch)               ──┐
    augmentation.py    draws of (seed, epoch, step, member)   ──┼─ Planned ── TorchPipeline | DaliPipeline ── Finish
    sources.py         uint8 images, one copy on a node       ──┘             crop, flip, normalize

Both pipelines compute the same views, up to float rounding. Vectors are only normalized.

Legend: B batch, H rows, W columns, C channels, V values of a vector.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dicedist.algorithm.batch import Batch, paired, share
from dicedist.cluster.placement import Placement
from dicedist.config.schema import Config, DataConfig
from dicedist.data import uses_dali
from dicedist.data.augmentation import (
    Drawn,
    Finish,
    boxes,
    crop_and_flip,
    draw,
    padding,
    places,
    to_device,
    with_border,
)
from dicedist.data.encoded import Encoded
from dicedist.data.images import resized
from dicedist.data.order import balanced_order, checksum, epoch_order, num_batches
from dicedist.data.sources import Source, Split

RESIDENT = 2**30  # largest number of bytes of images, with their borders, that stays on a GPU
CACHED = 2**18  # values that are normalized at a time: as floats they fit into the cache of a core
Item = TypeVar("Item")


class Planned(NamedTuple):
    """One batch before its inputs are read: computed once, for the pipeline and for the step."""

    step: int
    everyone: Tensor  # indices of the whole batch
    rows: slice  # of the batch: rows that this rank trains on
    loaded: slice  # of the batch: rows that this rank reads, with the partners for mixing
    drawn: list[Drawn | None]  # for each view; None for vectors


class RawBatch(NamedTuple):
    inputs_B: Tensor  # images [B, H, W, C] or vectors [B, V]; rows [B] of images that the pipeline holds
    drawn: Drawn | None


class RawEncoded(NamedTuple):
    """Files that the pipeline will read, ahead of the step."""

    images: Encoded
    rows_B: Tensor
    drawn: Drawn

    @property
    def boxes_B4(self) -> Tensor:
        """Return the boxes of the crops: int64 (left, top, width, height)."""
        sizes_B2 = torch.from_numpy(self.images.sizes_R2[self.rows_B.numpy()]).double()
        crops_B4 = self.drawn.crops_B4
        return boxes(sizes_B2, None if crops_B4 is None else crops_B4.double()).long()


class Pipeline(Protocol):
    described: str  # a description for the user
    holds_images: bool  # are all images on the GPU?

    def stream(self, raw: Iterable[Any]) -> Generator[Tensor, None, None]:
        """Yield one view for each RawBatch or RawEncoded."""


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
        mixes: bool = False,
    ):
        """Prepare the loader. mixes: true if the step mixes neighbors, so that a replica must read whole pairs."""
        self.split, self.config, self.batch_size, self.seed, self.device = split, config, batch_size, seed, device
        self.replica, self.replicas, self.mixes, self.kind = replica, replicas, mixes, source.kind
        self.encoded = split.inputs_R if isinstance(split.inputs_R, Encoded) else None
        own: list[tuple[int, ...]] = [(member,) for member in members]
        self.viewers = own if config.per_member else [()] * bool(members)  # (): one view for all members
        self.pipeline = pipeline_for(config, replace(source, train=split), batch_size, device) if members else None
        self.finish = Finish(config, source, seed, device)

    @classmethod
    def of(cls, config: Config, source: Source, placement: Placement, rank: int, device: torch.device) -> Self:
        """Build the loader of a rank in a training."""
        members, replica = placement.members_on(rank), placement.replica_on(rank)
        replicas, mixes = placement.replicas if members else 1, config.loss.mixes
        settings = (config.data, source, config.batch_size, config.seed, device)
        return cls(source.train, *settings, members, replica, replicas, mixes)

    def endless(self) -> Iterator[Batch]:
        """Yield the batches of one epoch after another."""
        return itertools.chain.from_iterable(map(self.epoch, itertools.count()))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches from step `start` on, the same as in an uninterrupted epoch."""
        with contextlib.ExitStack() as stack:
            plans = self.planned(epoch, start)
            views: Iterator[Tensor] = iter(())
            if self.pipeline is not None:
                plans, ahead = itertools.tee(plans)
                raw = self.raw_batches(ahead, epoch)
                views = stack.enter_context(contextlib.closing(self.pipeline.stream(raw)))
            for step, everyone, rows, loaded, drawn in plans:
                size, indices_B, seen = len(everyone), everyone[loaded], zip(drawn, self.viewers, strict=True)
                labels_B = to_device(self.split.labels_N[indices_B], self.device)
                images = [self.finish(next(views), one, size, loaded, epoch, step, *viewer) for one, viewer in seen]
                mark, margin = checksum(everyone, epoch, step), (rows.start - loaded.start, loaded.stop - rows.stop)
                yield Batch(epoch, step, size, rows, indices_B, labels_B, mark, images, margin)

    def planned(self, epoch: int, start: int = 0) -> Iterator[Planned]:
        order_N = self.order(epoch)
        for step in range(start, num_batches(len(order_N), self.batch_size)):
            everyone = order_N[step * self.batch_size :][: self.batch_size]
            rows = share(len(everyone), self.replicas, self.replica)
            loaded = paired(rows, len(everyone)) if self.mixes else rows
            drawn = [self.draw(len(everyone), loaded, epoch, step, *viewer) for viewer in self.viewers]
            yield Planned(step, everyone, rows, loaded, drawn)

    def order(self, epoch: int) -> Tensor:
        if self.config.balance:
            return balanced_order(self.seed, epoch, self.split.labels_N)
        return epoch_order(self.seed, epoch, len(self.split))

    def draw(self, size: int, rows: slice, *where: int) -> Drawn | None:
        if self.kind == "vectors" or self.split.outputs_N is not None:
            return None
        return draw(self.config, size, self.seed, *where, encoded=self.encoded is not None).of(rows)

    def raw_batches(self, plans: Iterable[Planned], epoch: int) -> Iterator[RawBatch | RawEncoded]:
        """Yield the inputs of each view. The pipeline reads them ahead of the step."""
        for _, everyone, _, rows, drawn in plans:
            if self.split.outputs_N is not None:
                turns = (epoch + sum(viewer) for viewer in self.viewers)
                yield from (RawBatch(self.split.take_outputs(everyone[rows], turn), None) for turn in turns)
            elif self.encoded is None:
                holds_images = self.pipeline is not None and self.pipeline.holds_images
                inputs_B = (self.split.rows_of if holds_images else self.split.take)(everyone[rows])
                yield from (RawBatch(inputs_B, one) for one in drawn)
            else:
                rows_B = self.split.rows_of(everyone[rows])
                yield from (RawEncoded(self.encoded, rows_B, one) for one in drawn if one is not None)

    def close(self) -> None:
        """End DALI's threads and free its memory."""
        self.pipeline = None


def pipeline_for(config: DataConfig, source: Source, batch_size: int, device: torch.device) -> Pipeline:
    """Build the pipeline. `auto` takes the faster one (bench data): DALI to decode, torch for images in memory.

    DALI also prepares images that do not fit into the memory of a GPU, ahead of the step.
    """
    if source.trunk is not None:
        return Unchanged(device)
    encoded = isinstance(source.train.inputs_R, Encoded)
    decided = config.pipeline != "auto" or encoded or device.type == "cuda" and not fits(source)
    if source.kind == "images" and device.type in ("cpu", "cuda") and decided and uses_dali(config):
        from dicedist.data.dali import DaliBoxes, DaliDecoder, DaliPipeline

        decoder = DaliBoxes if device.type == "cpu" else DaliDecoder
        return (decoder if encoded else DaliPipeline)(config, source, batch_size, device)
    return TorchPipeline(config, source, device)


def fits(source: Source) -> bool:
    """Return true if all images can stay on a GPU: they are in memory, and with their borders they fit."""
    images, side = source.train.inputs_R, source.size + 2 * padding(source.size)
    return (
        source.kind == "images" and isinstance(images, Tensor) and source.shape[0] * len(images) * side**2 <= RESIDENT
    )


class Unchanged:
    """Pass on the outputs of a frozen trunk, which has read normalized images."""

    described, holds_images = "the frozen trunk has read the images", False

    def __init__(self, device: torch.device):
        self.device = device

    def stream(self, raw: Iterable[RawBatch]) -> Generator[Tensor, None, None]:
        yield from (to_device(batch.inputs_B, self.device) for batch in raw)


class TorchPipeline:
    """Runs on the CPU, in the calling thread or ahead in other threads; on CUDA it is queued after the images' copy.

    Files are always read and decoded ahead of the step, by at least one thread. Images that fit stay on the GPU with
    their borders. A batch then needs a copy of positions and four kernels.
    """

    def __init__(self, config: DataConfig, source: Source, device: torch.device):
        self.size, self.device, self.normalize = config.size, device, Normalize(source, device)
        spare = device.type == "cpu" and config.num_threads > 1 and source.kind == "images"
        self.num_threads = config.num_threads if spare or isinstance(source.train.inputs_R, Encoded) else 0
        self.holds_images, self.held_RHWC = device.type == "cuda" and fits(source), torch.empty(0)
        self.described = f"torch prepares the {source.kind}"
        if self.holds_images:
            assert isinstance(source.train.inputs_R, Tensor)
            self.held_RHWC = with_border(to_device(source.train.inputs_R, device))
            self.described += f", which stay on the GPU ({self.held_RHWC.nbytes / 1e6:,.0f} MB)"

    def stream(self, raw: Iterable[RawBatch | RawEncoded]) -> Generator[Tensor, None, None]:
        if not self.num_threads:
            yield from map(self.view, raw)
            return
        with ThreadPoolExecutor(self.num_threads) as threads:
            for view in ahead((threads.submit(self.view, batch) for batch in raw), self.num_threads):
                yield view.result()

    def view(self, raw: RawBatch | RawEncoded) -> Tensor:
        if isinstance(raw, RawEncoded):
            decoded = map(raw.images.decoded, raw.rows_B.tolist(), raw.boxes_B4.tolist())
            return self.view_of_boxes(map(torch.from_numpy, decoded), raw.drawn)
        inputs_B, drawn = raw
        if drawn is None:
            return self.normalize(to_device(inputs_B, self.device))
        rows_B = inputs_B if self.holds_images else torch.arange(len(inputs_B))
        bordered = self.held_RHWC if self.holds_images else with_border(to_device(inputs_B, self.device))
        taken = to_device(places(self.size, rows_B, drawn.starts_B2, drawn.flips_B), self.device)
        return self.normalize(crop_and_flip(bordered, taken))

    def view_of_boxes(self, boxes: Iterable[Tensor], drawn: Drawn) -> Tensor:
        """Resize decoded boxes [h, w, C] one by one: an image fits into the cache, a batch does not."""
        squares = zip((resized(box_HWC, self.size) for box_HWC in boxes), drawn.flips_B.tolist(), strict=True)
        flipped = [square.flip(1) if flip else square for square, flip in squares]
        return self.normalize(to_device(torch.stack(flipped), self.device))


class Normalize:
    """Normalize uint8 [B, H, W, C] to float32 [B, C, H, W], channels_last; vectors [B, V] value by value."""

    def __init__(self, source: Source, device: torch.device):
        std, mean = (torch.tensor(x, dtype=torch.float64) for x in (source.std, source.mean))
        # Repeated along a row of pixels, because an inner loop over three channels would be three times slower.
        levels, repeats = (255, source.size) if source.kind == "images" else (1, 1)
        self.scale_W = (1 / (levels * std)).float().repeat(repeats).to(device)
        self.shift_W = (-mean / std).float().repeat(repeats).to(device)

    def __call__(self, inputs_B: Tensor) -> Tensor:
        if inputs_B.ndim == 2:
            return inputs_B * self.scale_W + self.shift_W
        rows = inputs_B.view(-1, len(self.scale_W))
        views = torch.empty(rows.shape, device=rows.device)
        at_once = len(rows) if rows.is_cuda else max(1, CACHED // len(self.scale_W))
        for some, normalized in zip(rows.split(at_once), views.split(at_once), strict=True):
            torch.mul(some, self.scale_W, out=normalized).add_(self.shift_W)
        return views.view(inputs_B.shape).permute(0, 3, 1, 2)


def ahead(items: Iterable[Item], number: int) -> Iterator[Item]:
    """Yield the items, each `number` items later than it was made."""
    waiting: deque[Item] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > number:
            yield waiting.popleft()
    yield from waiting


def evaluation_batches(
    split: Split, source: Source, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalized images [B, C, H, W] or vectors [B, V], not augmented, and labels [B], in the split's order.

    If a frozen trunk has read the split, yield the outputs of the trunk instead.
    """
    normalize = Normalize(source, device)
    for start in range(0, len(split), batch_size):
        indices_B = torch.arange(start, min(start + batch_size, len(split)))
        labels_B = to_device(split.labels_N[indices_B], device)
        if split.outputs_N is not None:
            yield to_device(split.outputs_N[indices_B, 0], device), labels_B
        else:
            yield normalize(to_device(split.take(indices_B), device)), labels_B
