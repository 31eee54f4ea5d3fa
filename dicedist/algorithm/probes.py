"""Probes let a term read more of a member than its features and logits, without changes to the step.

A term names the classes of its probes (`Objective.probes`). Encoders build them once and call them around the encoding
of every batch. A probe adds its results to `Encoding.probed` under its own name:

    images ── on_images ── trunk ── on_branches ── members ── on_encodings ── encodings

A probe that only one method needs is defined in the file of that method's term.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from dicedist.algorithm.batch import Views
from dicedist.algorithm.member import Encoding
from dicedist.algorithm.parts import Hosted
from dicedist.config.schema import Config

if TYPE_CHECKING:
    from dicedist.algorithm.objectives import Objective


class Probe:
    """The hooks of a probe. By default they do nothing: override the hooks that you need.

    Examples:
        >>> class Brightness(Probe):
        ...     def on_encodings(self, encodings, images):
        ...         for member, own in encodings.items():
        ...             own.probed["brightness"] = images[member].mean((1, 2, 3))
        >>> Brightness.keeps  # the network outputs that the probe reads
        ()
    """

    keeps: ClassVar[tuple[str, ...]] = ()  # outputs of the network that encodings keep: "trunk", "map"

    def __init__(self, term: "Objective", hosted: Hosted, num_members: int, teacher: nn.Module | None):
        """term: the first term that names this probe. teacher: maps images to logits [B, T, K], or None."""
        self.hosted, self.num_members, self.teacher = hosted, num_members, teacher

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise a ValueError if this probe cannot work with these settings."""

    def on_images(self, images: Views) -> Views:
        """Change the images that the networks read (the trunk, if there is one)."""
        return images

    def on_branches(self, outputs: Views) -> Views:
        """Change the trunk outputs that branches read; not called for nets."""
        return outputs

    def on_encodings(self, encodings: Mapping[int, Encoding], images: Views) -> None:
        """Add results to the encodings. images: as the networks read them."""


class LastMap(Probe):
    """The last map before pooling, [B, C, H, W], as `probed["map"]`."""

    keeps = ("map",)


class TrunkOutput(Probe):
    """The trunk's output, [B, C, H, W] or [B, C], as `probed["trunk"]`: a branch's input, or a net's middle."""

    keeps = ("trunk",)


def refuse_settings(config: Config, reason: str) -> None:
    """Raise a ValueError for settings under which a batch cannot be differentiated twice."""
    for given, instead in (
        (config.compile, "compile=false"),
        (config.ensemble.replicas > 1, "ensemble.replicas=1"),
        (config.precision == "fp16", "precision=bf16"),
        (config.optimizer.accumulate > 1, "optimizer.accumulate=1"),
    ):
        if given:
            raise ValueError(f"method={config.method.name} {reason}: write {instead}")
