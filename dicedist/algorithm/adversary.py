"""A part that stands beside the members: it reads their features, returns gradients by their means, then learns.

Legend: M members, B inputs, D features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dicedist.algorithm.schedules import Moment


@dataclass(frozen=True)
class Features:
    """What the members say of one batch; detached, on the adversary's device."""

    means_MBD: Tensor
    scales_MBD: Tensor


class Adversary(nn.Module):
    """The step calls both methods once: the gradients come from the weights of the step before."""

    def redundancy_gradients(
        self, features: Features, labels_B: Tensor, now: Moment, where: tuple[int, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """d(loss)/d(means) [M, B, D] with its weight applied, and named values for the records.

        where: (epoch, step in the epoch), which keys whatever is drawn.
        """
        raise NotImplementedError

    def learn(
        self,
        optimizer: torch.optim.Optimizer,
        features: Features,
        labels_B: Tensor,
        now: Moment,
        where: tuple[int, int],
    ) -> dict[str, Tensor]:
        """Its own training on the same features; named values for the records."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError
