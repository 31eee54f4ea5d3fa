"""Which inputs a batch holds and how each is augmented: functions of (seed, epoch, step), the same on every rank.

Legend: N inputs of the split, B inputs of the batch, V values of a vector.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dicedist.algorithm.randomness import generator, seed_for
from dicedist.config.schema import DataConfig

RATIO = math.log(4 / 3)  # of a crop's width to its height, at most and at least
ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64


class Augmentation(NamedTuple):
    starts_B2: Tensor  # int32 (y, x) of the crop's corner; pixels outside the image are black
    flips_B: Tensor  # bool
    cutout_B2: Tensor | None  # int32 (y, x), the centre of the blanked square
    crops_B4: Tensor | None = None  # of encoded images, see encoded.pixel_boxes; then the starts count for nothing

    def of(self, rows: slice) -> "Augmentation":
        return Augmentation._make(None if drawn is None else drawn[rows] for drawn in self)


@functools.lru_cache(maxsize=2)  # the current epoch, and the first batches of the next
def epoch_order(seed: int, epoch: int, num_inputs: int) -> Tensor:
    """A permutation of the inputs, int64 [N]. Shared between callers: do not write to it."""
    return torch.randperm(num_inputs, generator=generator("cpu", seed, "order", epoch))


def balanced_order(seed: int, epoch: int, labels_N: Tensor) -> Tensor:
    """An order as long as the inputs, with every class equally often (to one), the inputs of a class in turn."""
    draws = generator("cpu", seed, "order", epoch)
    classes = labels_N.unique()
    each, extra = divmod(len(labels_N), len(classes))
    chosen = []
    for place, label in enumerate(classes[torch.randperm(len(classes), generator=draws)]):
        own = (labels_N == label).nonzero().flatten()
        wanted = each + (place < extra)
        rounds = [own[torch.randperm(len(own), generator=draws)] for _ in range(-(-wanted // len(own)))]
        chosen.append(torch.cat([own[:0], *rounds])[:wanted])
    order_N = torch.cat(chosen)
    return order_N[torch.randperm(len(order_N), generator=draws)]


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
    names = config.augmentations
    if not {"crop", "flip", "cutout"} & set(names):
        return Augmentation(torch.zeros(batch, 2, dtype=torch.int32), torch.zeros(batch, dtype=torch.bool), None)
    where = (epoch, step_in_epoch) if member is None else (epoch, step_in_epoch, member)
    draws = generator("cpu", seed, "augmentation", *where)
    reach = padding(config.size)
    starts_B2 = torch.randint(-reach, reach + 1, (batch, 2), generator=draws, dtype=torch.int32)
    flips_B = torch.randint(2, (batch,), generator=draws, dtype=torch.bool)
    cutout_B2 = torch.randint(config.size, (batch, 2), generator=draws, dtype=torch.int32)
    return Augmentation(
        starts_B2 if "crop" in names else torch.zeros_like(starts_B2),
        flips_B if "flip" in names else torch.zeros_like(flips_B),
        cutout_B2 if "cutout" in names else None,
    )


def resized_crops(
    seed: int, epoch: int, step_in_epoch: int, batch: int, config: DataConfig, member: int | None = None
) -> Augmentation:
    """For encoded images: crops of a share and shape each, with the flips and squares that `augmentation` draws."""
    drawn = augmentation(seed, epoch, step_in_epoch, batch, config, member)
    if "crop" not in config.augmentations:
        return drawn
    where = (epoch, step_in_epoch) if member is None else (epoch, step_in_epoch, member)
    shares_B4 = torch.rand(batch, 4, generator=generator("cpu", seed, "crops", *where))
    low, high = config.crop_area
    low_B4 = torch.tensor([low, -RATIO, 0, 0])
    return drawn._replace(crops_B4=low_B4 + shares_B4 * (torch.tensor([high, RATIO, 1, 1]) - low_B4))


def noise(
    seed: int, epoch: int, step_in_epoch: int, shape: tuple[int, int], config: DataConfig, member: int | None = None
) -> Tensor | None:
    """What is added to a batch of standardised vectors [B, V], for one member or for all; None: nothing."""
    if not config.noise:
        return None
    where = (epoch, step_in_epoch) if member is None else (epoch, step_in_epoch, member)
    return config.noise * torch.randn(shape, generator=generator("cpu", seed, "augmentation", *where))


def checksum(indices_B: Tensor, epoch: int, step_in_epoch: int) -> int:
    """63 bits that change with any input, its place in the batch, the epoch or the step."""
    places_B = (2 * torch.arange(len(indices_B)) + 1) * ODD
    return seed_for(int(((indices_B + 1) * places_B).sum()), "batch", epoch, step_in_epoch)
