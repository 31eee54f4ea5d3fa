"""The targets of members: labels, perhaps smoothed, weighted by class, or mixed from two inputs.

Legend: B inputs, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.mixing import draw, partners
from dicedist.config.schema import LossConfig


@dataclass(frozen=True)
class Loss:
    """The config group `loss`, with the class weights as numbers. shape: of an input."""

    seed: int
    shape: Sequence[int] = ()
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    weights_K: Tensor | None = None

    @classmethod
    def of(
        cls, config: LossConfig, seed: int, shape: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> Self:
        """Read the config. counts: training inputs of each class."""
        given = config.class_weights
        if given == "balanced":
            given = [sum(counts) / (len(counts) * count) for count in counts]
        if given is not None and len(given) != len(counts):
            raise ValueError(
                f"loss.class_weights has {len(given)} numbers for {len(counts)} classes: write one for each"
            )
        weights_K = None if given is None else torch.tensor(given, dtype=torch.float32, device=device)
        return cls(seed, shape, config.label_smoothing, config.mixup, config.cutmix, weights_K)

    def prepare(self, batch: Batch) -> tuple[Batch, "Targets"]:
        """Mix the inputs and drop the margin if mixup or CutMix is on; return the batch and its targets.

        The class of the larger share comes first. w reads only this class, also on a rank without images.
        """
        mixing = draw(self.mixup, self.cutmix, self.shape, self.seed, *batch.key)
        if mixing is None:
            return batch, Targets(batch.labels_B, None, 1.0, self.label_smoothing, self.weights_K)
        mixed = replace(batch, images=[mixing.of_inputs(images) for images in batch.images]).trimmed()
        others_B = batch.labels_B[partners(len(batch.labels_B), batch.labels_B.device)][batch.kept]
        shares = [(mixing.own, mixed.labels_B), (1.0 - mixing.own, others_B)]
        (own, labels_B), (_, others_B) = shares if mixing.own >= 0.5 else reversed(shares)
        return mixed, Targets(labels_B, others_B, own, self.label_smoothing, self.weights_K)


@dataclass(frozen=True)
class Targets:
    """The labels of a batch. In a mixed input, `labels_B` has the share `own` >= 1/2 and `others_B` has the rest."""

    labels_B: Tensor
    others_B: Tensor | None = None
    own: float = 1.0
    smoothing: float = 0.0
    weights_K: Tensor | None = None

    def expected(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the expectation of a function of labels [B] over the two labels of mixed inputs."""
        if self.others_B is None:
            return value(self.labels_B)
        return self.own * value(self.labels_B) + (1.0 - self.own) * value(self.others_B)

    def cross_entropy(self, logits_BK: Tensor) -> Tensor:
        """Return the mean over inputs, also with class weights: torch would divide by the batch's sum of weights."""
        if self.weights_K is None:
            return self.expected(lambda labels_B: F.cross_entropy(logits_BK, labels_B, label_smoothing=self.smoothing))
        return self.expected(
            lambda labels_B: F.cross_entropy(
                logits_BK, labels_B, self.weights_K, label_smoothing=self.smoothing, reduction="none"
            ).mean()
        )
