"""The adversary of the members: it reads their features, returns gradients with respect to their means, then learns.

Legend: M members, B inputs, D features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dicedist.algorithm.schedules import Moment


@dataclass(frozen=True)
class Features:
    """The members' features of one batch, detached and on the adversary's device."""

    means_MBD: Tensor
    scales_MBD: Tensor


class Adversary(nn.Module):
    """A step calls redundancy_gradients, then learn: the gradients come from the weights of the previous step."""

    def redundancy_gradients(
        self, features: Features, labels_B: Tensor, now: Moment, where: tuple[int, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """d(loss)/d(means) [M, B, D] with its weight applied, and named values for the records.

        where: (epoch, step in the epoch), the key of all random draws.
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
        """Train on the same features, and return named values for the records."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError
