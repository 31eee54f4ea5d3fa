"""A member of the ensemble: encoder, bottleneck head and classifier.

Legend: B inputs, D features, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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
    raw_scale_BD: Tensor | None = None  # the scale before softplus
    probed: dict[str, Tensor] = field(default_factory=dict)  # results of probes, by their names

    @classmethod
    def joined(cls, pieces: Sequence["Encoding"]) -> "Encoding":
        """Concatenate the encodings of a batch's pieces."""

        def column(name: str) -> Any:
            rows = [getattr(piece, name) for piece in pieces]
            return None if rows[0] is None else torch.cat(rows)

        probed = {name: torch.cat([piece.probed[name] for piece in pieces]) for name in pieces[0].probed}
        return cls(**{name: column(name) for name in TENSORS}, probed=probed)

    def apart(self, count: int) -> list["Encoding"]:
        """Split the encoding of `count` members that lie side by side into one encoding per member."""

        def slices(value: Tensor | None) -> Sequence[Any]:
            return [None] * count if value is None else value.chunk(count, 1)

        columns = {name: slices(getattr(self, name)) for name in TENSORS}
        probed = {name: slices(value) for name, value in self.probed.items()}

        def of(nth: int) -> Encoding:
            own = {name: values[nth] for name, values in columns.items()}
            return Encoding(**own, probed={name: values[nth] for name, values in probed.items()})

        return [of(nth) for nth in range(count)]


TENSORS = tuple(entry.name for entry in fields(Encoding) if entry.name != "probed")


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
        """Return the scale and its value before softplus, in at least float32."""
        raw_BD = to_float32(self.scale(mean_BD))
        return F.softplus(raw_BD), raw_BD


class Member(nn.Module):
    """Encoder, bottleneck and classifier. A net's encoder reads images, a branch's reads the shared trunk's output."""

    def __init__(self, encoder: Network, num_classes: int, prior_rows: int | None):
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.feature_dim, num_classes)
        self.bottleneck = None if prior_rows is None else Bottleneck(encoder.feature_dim, prior_rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits from the mean, for inference."""
        return self.classifier(self.encoder(inputs))

    def encode(self, inputs: Tensor, noise_BD: Tensor | None, keeps: Sequence[str] = ()) -> Encoding:
        """Return features, and logits from one sample of z, by the reparameterization trick.

        keeps: outputs of the network for probes, "trunk" or "map", if the network has them.
        """
        outputs = self.encoder.outputs(inputs)
        mean_BD = to_float32(outputs.features_BD)
        scale_BD, raw_scale_BD, z_BD = None, None, mean_BD
        if self.bottleneck is not None:
            assert noise_BD is not None
            scale_BD, raw_scale_BD = self.bottleneck(mean_BD)
            z_BD = mean_BD + scale_BD * noise_BD
        logits_BK = to_float32(self.classifier(z_BD))
        kept = {"trunk": outputs.trunk_BCHW, "map": outputs.map_BCHW}
        probed = {name: value for name in keeps if (value := kept[name]) is not None}
        return Encoding(mean_BD, scale_BD, z_BD, logits_BK, raw_scale_BD, probed)


class Encode(nn.Module):
    """A member's `encode` as the forward of a module, so that it can be wrapped for replicas."""

    def __init__(self, member: Member, keeps: Sequence[str] = ()):
        super().__init__()
        self.member, self.keeps = member, tuple(keeps)

    def forward(self, inputs: Tensor, noise_BD: Tensor | None) -> Encoding:
        return self.member.encode(inputs, noise_BD, self.keeps)


def to_float32(values: Tensor) -> Tensor:
    """Convert the half precision of autocast layers to float32, before values are sampled, sent or compared."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
