"""The companion of one member: a part that trains the member's encoder with a second optimizer, then learns itself.

Legend: B inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dicedist.algorithm.messages import Fields, Values
from dicedist.algorithm.networks import Network
from dicedist.algorithm.optimizers import set_rate
from dicedist.algorithm.parts import Part
from dicedist.algorithm.schedules import ScheduleValues


class Companion(nn.Module):
    """A module that teaches one member with its weights from the previous step, and learns after the member's update.

    fields: by member. The fields of the companion's own member have gradients, the fields of peers are constant.
    """

    def lesson(self, fields: Mapping[int, Fields]) -> Tensor:
        """Return the loss that the second optimizer lowers over the member's encoder."""
        raise NotImplementedError

    def study(self, optimizer: torch.optim.Optimizer, fields: Mapping[int, Fields], now: ScheduleValues) -> Tensor:
        """Train on the same fields, and return the loss."""
        raise NotImplementedError

    def build_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def build_second(self, encoder: Network) -> torch.optim.Optimizer:
        raise NotImplementedError

    def rate(self, now: ScheduleValues) -> float:
        """Return the learning rate of both optimizers."""
        raise NotImplementedError


@dataclass(kw_only=True)
class TaughtMember(Part):
    """A member with a companion. The second optimizer applies the companion's lessons to the encoder."""

    companion: Part
    second: torch.optim.Optimizer
    lesson: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # gradients for the second optimizer

    @property
    def teacher(self) -> Companion:
        assert isinstance(self.companion.module, Companion)
        return self.companion.module

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return super().optimizers | {"second": self.second}

    @property
    def attached(self) -> list[Part]:
        return [self.companion]

    def before_backward(self, fields: Mapping[int, Fields], now: ScheduleValues) -> Values:
        """Compute the lesson's gradients before the first optimizer changes the weights."""
        taught = [parameter for group in self.second.param_groups for parameter in group["params"]]
        loss = self.teacher.lesson(fields)
        gradients = torch.autograd.grad(loss, taught, retain_graph=True)
        self.lesson = list(zip(taught, gradients, strict=True))
        return {"lesson": loss.detach()}

    def step(self, now: ScheduleValues, scaler: torch.amp.GradScaler) -> None:
        super().step(now, scaler)
        for parameter, gradient in self.lesson:
            parameter.grad = gradient
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_([parameter for parameter, _ in self.lesson], self.clip_norm)
        set_rate(self.second, self.teacher.rate(now))
        self.second.step()
        self.second.zero_grad(set_to_none=True)
        self.lesson.clear()

    def after_update(self, fields: Mapping[int, Fields], now: ScheduleValues) -> Values:
        return {"companion": self.teacher.study(self.companion.optimizer, fields, now)}
