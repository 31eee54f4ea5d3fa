"""Outputs of a frozen trunk: computed once for all images, kept with other prepared data, and read by members.

    images ── view 0: as they are ──────┐
           └─ views 1..: augmented ─────┴─ frozen trunk ── outputs [N, views, ...] in the cache ── heads

Draws of a view are keyed by its number. So runs of any seed share the outputs, and a lost cache can be made again.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dicedist.cluster.heartbeat import advance
from dicedist.config.schema import DataConfig
from dicedist.console.lines import duration, say
from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.prepared import Build, NewArray, Prepared, home, prepare
from dicedist.data.reading import shown
from dicedist.data.sets.own import Items
from dicedist.data.sources import Source, Split

VERSION = 1  # increase it when the outputs for the same weights and images change
BATCH_ON_CPU, BATCH_ON_GPU = 16, 64  # malloc keeps no block above 32 MB: at 224 pixels 64 images take twice the time
SPLITS = ("train", "val", "test")
MB = 1e6


@dataclass(frozen=True, eq=False)
class FrozenTrunk:
    """Reads the splits of a source, and any other images, on the device of its weights."""

    module: nn.Module  # in evaluation mode
    key: tuple[object, ...]  # identifies the trunk whose outputs are cached
    shape: tuple[int, ...]  # of one output
    config: DataConfig  # number of views, and how they are augmented

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def batch(self) -> int:
        return BATCH_ON_CPU if self.device.type == "cpu" else BATCH_ON_GPU

    def read_all(self, source: Source) -> Source:
        """Return the source with outputs for all of its images. Every process of a node may call this at once."""
        config = self.config
        splits = {name: getattr(source, name) for name in SPLITS if len(getattr(source, name))}
        views = {name: config.views if name == "train" else 1 for name in splits}

        def build(new_array: NewArray) -> dict[str, Any]:
            self.announce(source, sum(len(split) * views[name] for name, split in splits.items()))
            for name, split in splits.items():
                self.fill(new_array(name, (len(split), views[name], *self.shape), np.float32), split, source, name)
            return {}

        drawn = (config.views, config.augmentations, config.crop_area, config.cutout_size) if config.views > 1 else ()
        # For a Dataset of the user only a sample is digested, so changed images might not be noticed: keep nothing.
        own = [pixels_digest(split) for split in splits.values() if isinstance(split.inputs_R, Items)]
        kept = self.kept(build, source, source.data_digest, *own, *drawn)
        read = {name: replace(split, outputs_N=torch.from_numpy(kept.array(name))) for name, split in splits.items()}
        return replace(source, trunk=self, **read)

    def read(self, split: Split, source: Source) -> Split:
        """Return OOD or shifted images with their outputs, which are cached under a digest of the pixels."""

        def build(new_array: NewArray) -> dict[str, Any]:
            self.fill(new_array("outputs", (len(split), 1, *self.shape), np.float32), split, source, "other")
            return {}

        kept = self.kept(build, source, pixels_digest(split))
        return replace(split, outputs_N=torch.from_numpy(kept.array("outputs")))

    def kept(self, build: Build, source: Source, *images: object) -> Prepared:
        return prepare("outputs", home(), [], build, VERSION, *self.key, source.mean, source.std, source.size, *images)

    def announce(self, source: Source, images: int) -> None:
        """Log the disk and time that the outputs of these images need. Refuse them if the disk is too small."""
        size = images * math.prod(self.shape) * 4
        about = f"outputs of the frozen trunk for {images:,} images take {size / MB:,.0f} MB in {home()}"
        if home().exists() and size > (free := shutil.disk_usage(home()).free):
            raise ValueError(
                f"{about}, which has {free / MB:,.0f} MB free: lower data.views, split nearer to the features, or set "
                "DICEDIST_DATA"
            )
        first = next(self.batches(source.test, source, 0))
        for _ in range(2):  # the first pass sets up the kernels
            started = time.monotonic()
            self.outputs(first)
        say(f"{about}, and about {duration((time.monotonic() - started) / len(first) * images)} once")

    def fill(self, outputs_N: NDArray[np.float32], split: Split, source: Source, name: str) -> None:
        views, start = outputs_N.shape[1], 0
        batches = (images for view in range(views) for images in self.batches(split, source, view))
        count = views * -(-len(split) // self.batch)
        for images in shown(batches, count, f"batches of {name} images through the trunk"):
            view, place = divmod(start, len(split))
            outputs_N[place : place + len(images), view] = self.outputs(images)
            start += len(images)

    def batches(self, split: Split, source: Source, view: int) -> Iterator[Tensor]:
        """Yield a view of all images in order: view 0 as in evaluation, other views augmented as in training."""
        device = self.device
        if view == 0:
            yield from (images for images, _ in evaluation_batches(split, source, self.batch, device))
            return
        plain = replace(self.config, per_member=False, noise=0.0)
        yield from (batch.images[0] for batch in InOrder(split, plain, source, self.batch, 0, device, [0]).epoch(view))

    @torch.inference_mode()
    def outputs(self, images: Tensor) -> NDArray[np.float32]:
        return self.module(images).float().cpu().numpy()


def pixels_digest(split: Split) -> str:
    total = hashlib.blake2b(digest_size=16)
    for rows_B in torch.arange(len(split)).split(BATCH_ON_CPU):
        total.update(split.take(rows_B).numpy().data)
        advance()
    return total.hexdigest()


class InOrder(Loader):
    """Augmented batches of a split from its first image to its last."""

    def order(self, epoch: int) -> Tensor:
        return torch.arange(len(self.split))
