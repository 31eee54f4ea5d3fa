"""Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019): each input takes something of its neighbour in the batch.

The order of an epoch is random, so neighbours are random partners: 0 and 1, 2 and 3, ...; a last one without partner
stays as it is. All members see the same mixture. Of every mixture the larger share is the input's own, so its own label
stays the likelier one; as both of a pair are mixed, that only decides which of the two mixtures is called the first's.

Legend: B inputs, C colours, H rows, W columns, V values of a vector.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dicedist.algorithm.randomness import seed_for


@dataclass(frozen=True)
class Mixing:
    """How one batch is mixed.

    own: the share of an input itself, from 0.5 to 1. box: where CutMix shows the partner, in 0..1.
    """

    own: float
    box: tuple[float, float, float, float] | None = None  # top, bottom, left, right

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """Mixes images [B, C, H, W] or, without a box, vectors [B, V]."""
        others = inputs[partners(len(inputs), inputs.device)]
        if self.box is None:
            return inputs.lerp(others, 1.0 - self.own)
        top, bottom, left, right = self.pixels(inputs.shape[2], inputs.shape[3])
        mixed = inputs.clone()
        mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        return mixed

    def pixels(self, height: int, width: int) -> tuple[int, int, int, int]:
        assert self.box is not None
        top, bottom, left, right = self.box
        return round(top * height), round(bottom * height), round(left * width), round(right * width)

    def own_share(self, inputs: Tensor) -> float:
        """The share that inputs keep: that of the pixels which CutMix left, after its box was cut off at the border."""
        if self.box is None:
            return self.own
        height, width = inputs.shape[2:]
        top, bottom, left, right = self.pixels(height, width)
        return 1.0 - (bottom - top) * (right - left) / (height * width)


def partners(batch: int, device: torch.device) -> Tensor:
    return (torch.arange(batch, device=device) ^ 1).clamp_max(batch - 1)


def draw(mixup: float, cutmix: float, seed: int, epoch: int, step: int) -> Mixing | None:
    """The mixing of a batch, the same on every rank. mixup, cutmix: alpha of their Beta(alpha, alpha); 0: without.

    With both, each batch is mixed in one of the two ways.
    """
    if not mixup and not cutmix:
        return None
    draws = random.Random(seed_for(seed, "mixing", epoch, step))
    cuts = bool(cutmix) and (not mixup or draws.random() < 0.5)
    alpha = cutmix if cuts else mixup
    share = draws.betavariate(alpha, alpha)
    own = max(share, 1.0 - share)
    if not cuts:
        return Mixing(own)
    half = (1.0 - own) ** 0.5 / 2
    centres = draws.random(), draws.random()
    edges = [min(1.0, max(0.0, centre + side)) for centre in centres for side in (-half, half)]
    return Mixing(own, (edges[0], edges[1], edges[2], edges[3]))
