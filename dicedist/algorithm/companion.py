"""The companion of one member: a part that lives with it, teaches its encoder by a second optimiser, then learns.

Legend: B inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dicedist.algorithm.messages import Fields
from dicedist.algorithm.networks import Network
from dicedist.algorithm.schedules import Moment


class Companion(nn.Module):
    """A step calls lesson, updates the member, then calls study: the lesson comes from the weights of the step before.

    fields: by member; those of the companion's own member with gradient, those of peers constant.
    """

    def lesson(self, fields: Mapping[int, Fields]) -> Tensor:
        """The loss that the second optimiser lowers over the member's encoder, at the weights of this step."""
        raise NotImplementedError

    def study(self, optimizer: torch.optim.Optimizer, fields: Mapping[int, Fields], now: Moment) -> Tensor:
        """Train on the same fields, and return the loss."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def build_second(self, encoder: Network) -> torch.optim.Optimizer:
        raise NotImplementedError

    def rate(self, now: Moment) -> float:
        """The learning rate of both optimisers."""
        raise NotImplementedError
