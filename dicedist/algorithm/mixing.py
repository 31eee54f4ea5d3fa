"""Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019): each input takes something of its neighbor in the batch.

The order of an epoch is random, so neighbors are random partners: 0 and 1, 2 and 3, ... of the whole batch; a last one
without partner stays as it is. All members see the same mixture. In mixup an input keeps the larger share of itself.
Both inputs of a pair are mixed, so this only decides which of the two mixtures comes first. CutMix shows a box of the
partner, which may have any size, as published.

Legend: B inputs, C colors, H rows, W columns, V values of a vector.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dicedist.algorithm.randomness import seed_for


@dataclass(frozen=True)
class Mixing:
    """The mixing of one batch.

    own: the share of an input itself. box: the pixels where CutMix shows the partner (top, bottom, left, right).
    """

    own: float
    box: tuple[int, int, int, int] | None = None

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """Mix images [B, C, H, W] or, without a box, vectors [B, V]."""
        others = inputs[partners(len(inputs), inputs.device)]
        if self.box is None:
            return inputs.lerp(others, 1.0 - self.own)
        top, bottom, left, right = self.box
        mixed = inputs.clone()
        mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        return mixed


def partners(batch: int, device: torch.device) -> Tensor:
    return (torch.arange(batch, device=device) ^ 1).clamp_max(batch - 1)


def draw(mixup: float, cutmix: float, shape: Sequence[int], seed: int, epoch: int, step: int) -> Mixing | None:
    """Draw the mixing of a batch, the same on every rank. mixup, cutmix: alpha of Beta(alpha, alpha), or 0 for none.

    With both, each batch is mixed in one of the two ways. shape: of an input.
    """
    if not mixup and not cutmix:
        return None
    draws = random.Random(seed_for(seed, "mixing", epoch, step))
    cuts = bool(cutmix) and (not mixup or draws.random() < 0.5)
    alpha = cutmix if cuts else mixup
    share = draws.betavariate(alpha, alpha)
    if not cuts:
        return Mixing(max(share, 1.0 - share))
    _, height, width = shape
    half = (1.0 - share) ** 0.5 / 2
    (top, bottom), (left, right) = (
        [min(length, max(0, round((center + side) * length))) for side in (-half, half)]
        for length, center in ((height, draws.random()), (width, draws.random()))
    )
    return Mixing(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))
