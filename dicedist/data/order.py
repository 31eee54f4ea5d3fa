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
    starts_B2: Tensor  # int32 (y, x) of the crop's corner; pixels outside the image are black
    flips_B: Tensor  # bool
    cutout_B2: Tensor | None  # int32 (y, x), the centre of the blanked square

    def of(self, rows: slice) -> "Augmentation":
        cutout_B2 = None if self.cutout_B2 is None else self.cutout_B2[rows]
        return Augmentation(self.starts_B2[rows], self.flips_B[rows], cutout_B2)


@functools.lru_cache(maxsize=2)  # the current epoch, and the first batches of the next
def epoch_order(seed: int, epoch: int, num_inputs: int) -> Tensor:
    """A permutation of the inputs, int64 [N]. Shared between callers: do not write to it."""
    return torch.randperm(num_inputs, generator=generator("cpu", seed, "order", epoch))


def num_batches(num_inputs: int, batch_size: int) -> int:
    """Includes the last, smaller batch: each input is seen once per epoch."""
    return -(-num_inputs // batch_size)


def batch_indices(seed: int, epoch: int, step_in_epoch: int, num_inputs: int, batch_size: int) -> Tensor:
    start = step_in_epoch * batch_size
    return epoch_order(seed, epoch, num_inputs)[start : start + batch_size]


def padding(size: int) -> int:
    """How far a crop may reach beyond the image: 4 pixels of 32, and in proportion (8 of 64, 12 of 96)."""
    return size // 8


def augmentation(
    seed: int, epoch: int, step_in_epoch: int, batch: int, config: DataConfig, member: int | None = None
) -> Augmentation:
    """The augmentation of a batch for one member, or, without a member, the one that all members share."""
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
    """63 bits that change with any input, its place in the batch, the epoch or the step."""
    places_B = (2 * torch.arange(len(indices_B)) + 1) * ODD
    return seed_for(int(((indices_B + 1) * places_B).sum()), "batch", epoch, step_in_epoch)
