"""Which images a batch holds and how each is augmented: functions of (seed, epoch, step), the same on every rank.

Legend: N inputs of the split, B inputs of the batch.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dicedist.algorithm.randomness import generator, seed_for
from dicedist.config.schema import DataConfig

ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64


class Augmentation(NamedTuple):
    starts_B2: Tensor  # int32 (y, x) of the crop's corner: negative or too far shows black
    flips_B: Tensor  # bool
    cutout_B2: Tensor | None  # int32 (y, x), the middle of the square that is blanked

    def of(self, rows: slice) -> "Augmentation":
        cutout_B2 = None if self.cutout_B2 is None else self.cutout_B2[rows]
        return Augmentation(self.starts_B2[rows], self.flips_B[rows], cutout_B2)


@functools.lru_cache(maxsize=2)  # the running epoch, and the next one's first batches
def epoch_order(seed: int, epoch: int, num_inputs: int) -> Tensor:
    """A permutation of the inputs, int64 [N]. Shared between callers: not to be written to."""
    return torch.randperm(num_inputs, generator=generator("cpu", seed, "order", epoch))


def num_batches(num_inputs: int, batch_size: int) -> int:
    """The last, smaller batch counts: each input is seen once an epoch."""
    return -(-num_inputs // batch_size)


def batch_indices(seed: int, epoch: int, step_in_epoch: int, num_inputs: int, batch_size: int) -> Tensor:
    start = step_in_epoch * batch_size
    return epoch_order(seed, epoch, num_inputs)[start : start + batch_size]


def padding(size: int) -> int:
    """How far a crop may leave the image: 4 pixels of 32, and in proportion (8 of 64, 12 of 96)."""
    return size // 8


def augmentation(
    seed: int, epoch: int, step_in_epoch: int, batch: int, config: DataConfig, member: int | None = None
) -> Augmentation:
    """Of a batch of so many inputs; without a member, the one that all members see."""
    if config.augment == "none":
        return Augmentation(torch.zeros(batch, 2, dtype=torch.int32), torch.zeros(batch, dtype=torch.bool), None)
    where = (epoch, step_in_epoch) if member is None else (epoch, step_in_epoch, member)
    draws = generator("cpu", seed, "augmentation", *where)
    reach = padding(config.size)
    starts_B2 = torch.randint(-reach, reach + 1, (batch, 2), generator=draws, dtype=torch.int32)
    flips_B = torch.randint(2, (batch,), generator=draws, dtype=torch.bool)
    if config.augment == "basic":
        return Augmentation(starts_B2, flips_B, None)
    cutout_B2 = torch.randint(config.size, (batch, 2), generator=draws, dtype=torch.int32)
    return Augmentation(starts_B2, flips_B, cutout_B2)


def checksum(indices_B: Tensor, epoch: int, step_in_epoch: int) -> int:
    """63 bits that differ when an input, its place, the epoch or the step does."""
    places_B = (2 * torch.arange(len(indices_B)) + 1) * ODD
    return seed_for(int(((indices_B + 1) * places_B).sum()), "batch", epoch, step_in_epoch)
