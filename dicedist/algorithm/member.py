"""A member of the ensemble: encoder, bottleneck head and classifier.

Legend: B inputs, D features, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.networks import Network


@dataclass
class Encoding:
    """The output of a member for one training batch. A deterministic member has z = mean and no scale."""

    mean_BD: Tensor
    scale_BD: Tensor | None
    z_BD: Tensor
    logits_BK: Tensor
    trunk_BCHW: Tensor | None = None  # the trunk's output; None if the network has no split point
    raw_scale_BD: Tensor | None = None  # whose softplus the scale is
    images_BCHW: Tensor | None = None  # where the method differentiates with respect to pixels
    averaged_BK: Tensor | None = None  # the logits of the moving average of the weights, if the method asks for them
    map_BCHW: Tensor | None = None  # the last map before pooling, if the method asks for it
    teacher_BTK: Tensor | None = None  # the logits of a teacher's members, if the method asks for them

    @classmethod
    def joined(cls, pieces: Sequence["Encoding"]) -> "Encoding":
        """The encoding of a batch, put together from those of its pieces."""
        joined: dict[str, Any] = {}
        for entry in fields(cls):
            rows = [getattr(piece, entry.name) for piece in pieces]
            joined[entry.name] = None if rows[0] is None else torch.cat(rows)
        return cls(**joined)

    def apart(self, count: int) -> list["Encoding"]:
        """The encodings of so many members, that stand side by side in this one."""
        each: list[dict[str, Any]] = [{} for _ in range(count)]
        for entry in fields(self):
            side_by_side = getattr(self, entry.name)
            slices = [None] * count if side_by_side is None else side_by_side.chunk(count, 1)
            for own, value in zip(each, slices, strict=True):
                own[entry.name] = value
        return [Encoding(**own) for own in each]


class Bottleneck(nn.Module):
    """The encoder's scale (softplus of a dense layer: docs/choices.md, 25) and the backward encoder's mean b(y).

    Inference needs neither.

    prior_rows: one mean per class (VCEB), a single one (VIB), or 0 if the prior is N(0, 1).
    """

    def __init__(self, feature_dim: int, prior_rows: int):
        super().__init__()
        self.scale = nn.Linear(feature_dim, feature_dim)
        if prior_rows:
            self.prior_KD = nn.Parameter(torch.randn(prior_rows, feature_dim))

    def forward(self, mean_BD: Tensor) -> tuple[Tensor, Tensor]:
        """The scale, and what softplus made it of, in float32 at least."""
        raw_BD = full(self.scale(mean_BD))
        return F.softplus(raw_BD), raw_BD


class Member(nn.Module):
    """In a net the encoder reads images; in a branch it reads the output of the shared trunk."""

    def __init__(self, encoder: Network, num_classes: int, prior_rows: int | None):
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.feature_dim, num_classes)
        self.bottleneck = None if prior_rows is None else Bottleneck(encoder.feature_dim, prior_rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits from the mean, for inference."""
        return self.classifier(self.encoder(inputs))

    def encode(self, inputs: Tensor, noise_BD: Tensor | None, with_map: bool = False) -> Encoding:
        """Features and logits from one sample of z, by the reparameterisation trick."""
        mean_BD, trunk_BCHW, map_BCHW = self.encoder.read(inputs)
        mean_BD = full(mean_BD)
        scale_BD, raw_scale_BD, z_BD = None, None, mean_BD
        if self.bottleneck is not None:
            assert noise_BD is not None
            scale_BD, raw_scale_BD = self.bottleneck(mean_BD)
            z_BD = mean_BD + scale_BD * noise_BD
        logits_BK = full(self.classifier(z_BD))
        own_map_BCHW = full(map_BCHW) if with_map and map_BCHW is not None else None
        return Encoding(mean_BD, scale_BD, z_BD, logits_BK, trunk_BCHW, raw_scale_BD, map_BCHW=own_map_BCHW)


class Encode(nn.Module):
    """A member's `encode` as the forward of a module, so that it can be wrapped for replicas."""

    def __init__(self, member: Member, with_map: bool = False):
        super().__init__()
        self.member, self.with_map = member, with_map

    def forward(self, inputs: Tensor, noise_BD: Tensor | None) -> Encoding:
        return self.member.encode(inputs, noise_BD, self.with_map)


def full(values: Tensor) -> Tensor:
    """Autocast layers return half precision; values that are sampled, sent or compared are float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
