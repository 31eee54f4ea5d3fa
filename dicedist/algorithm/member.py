"""A member of the ensemble: encoder, bottleneck head and classifier.

Legend: B inputs, D features, K classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.networks import Network

TINY = -80.0  # below which softplus(x) is exp(x) to the last bit, and leaves the normal floats


@dataclass
class Encoding:
    """The output of a member for one training batch. A deterministic member has z = mean and no scale."""

    mean_BD: Tensor
    scale_BD: Tensor | None
    z_BD: Tensor
    logits_BK: Tensor
    trunk_BCHW: Tensor | None = None  # the trunk's output; None if the network has no split point
    log_scale_BD: Tensor | None = None


class Bottleneck(nn.Module):
    """The encoder's scale (softplus of a dense layer: docs/choices.md, 25) and the backward encoder's mean b(y).

    Inference needs neither.

    prior_rows: one mean per class (VCEB) or a single one (VIB).
    """

    def __init__(self, feature_dim: int, prior_rows: int):
        super().__init__()
        self.scale = nn.Linear(feature_dim, feature_dim)
        self.prior_KD = nn.Parameter(torch.randn(prior_rows, feature_dim))

    def forward(self, mean_BD: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and its logarithm, in float32 at least.

        Far below zero softplus(x) is exp(x), whose logarithm is x: so it stays finite, and keeps its gradient, where
        the scale itself underflows.
        """
        raw_BD = full(self.scale(mean_BD))
        scale_BD = F.softplus(raw_BD)
        is_tiny_BD = raw_BD < TINY
        return scale_BD, torch.where(is_tiny_BD, raw_BD, scale_BD.masked_fill(is_tiny_BD, 1.0).log())


class Member(nn.Module):
    """In a net the encoder reads images; in a branch it reads the output of the shared trunk."""

    def __init__(self, encoder: Network, num_classes: int, prior_rows: int):
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.feature_dim, num_classes)
        self.bottleneck = Bottleneck(encoder.feature_dim, prior_rows) if prior_rows else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits from the mean, for inference."""
        return self.classifier(self.encoder(inputs))

    def encode(self, inputs: Tensor, noise_BD: Tensor | None) -> Encoding:
        """Features and logits from one sample of z, by the reparameterisation trick."""
        mean_BD, trunk_BCHW = self.encoder.read(inputs)
        mean_BD = full(mean_BD)
        scale_BD, log_scale_BD, z_BD = None, None, mean_BD
        if self.bottleneck is not None:
            assert noise_BD is not None
            scale_BD, log_scale_BD = self.bottleneck(mean_BD)
            z_BD = mean_BD + scale_BD * noise_BD
        return Encoding(mean_BD, scale_BD, z_BD, full(self.classifier(z_BD)), trunk_BCHW, log_scale_BD)


class Encode(nn.Module):
    """A member's `encode` as the forward of a module, so that it can be wrapped for replicas."""

    def __init__(self, member: Member):
        super().__init__()
        self.member = member

    def forward(self, inputs: Tensor, noise_BD: Tensor | None) -> Encoding:
        return self.member.encode(inputs, noise_BD)


def full(values: Tensor) -> Tensor:
    """Autocast layers return half precision; values that are sampled, sent or compared are float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
