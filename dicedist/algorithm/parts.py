"""The parts of an ensemble on one rank: members, modules that members share, and their counterpart.

A part updates itself: the step computes gradients, and every part clips them, takes its optimizer step and moves its
average.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.counterpart import Counterpart
from dicedist.algorithm.member import Member
from dicedist.algorithm.messages import Fields, Values
from dicedist.algorithm.networks.freezing import frozen_norms, to_training
from dicedist.algorithm.optimizers import set_rate
from dicedist.algorithm.precision import Precision
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.spans import span
from dicedist.config import names


@dataclass
class Part:
    """A module, its optimizer and perhaps its moving average, saved under its own name whichever rank hosts it."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None = None
    clip_norm: float | None = None  # the largest norm of its gradient

    def __post_init__(self) -> None:
        self.train()

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by the names under which their states are saved."""
        return {"optimizer": self.optimizer}

    @property
    def attached(self) -> list["Part"]:
        """Return the parts that belong to this part and are trained by it."""
        return []

    @property
    def learns(self) -> bool:
        """Return whether any parameter is not frozen."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def train(self) -> None:
        """Switch all modules but frozen ones to training mode."""
        to_training(self.module, frozen_norms(self.module))

    def before_backward(self, fields: Mapping[int, Fields], now: ScheduleValues) -> Values:
        """Prepare for the backward pass. fields: of all members; this member's own fields have their graph."""
        return {}

    def update(self, now: ScheduleValues, scaler: torch.amp.GradScaler) -> None:
        """Take the optimizer steps, then move the average."""
        self.step(now, scaler)
        self.follow()

    def step(self, now: ScheduleValues, scaler: torch.amp.GradScaler) -> None:
        """Take one optimizer step with the present gradients, which are already unscaled."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        set_rate(self.optimizer, now.learning_rate)
        scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def after_update(self, fields: Mapping[int, Fields], now: ScheduleValues) -> Values:
        """Run after the update of all parts on this rank."""
        return {}

    def follow(self) -> None:
        """Move the average, if there is one, towards the weights."""
        if self.average is not None:
            self.average.follow(followed(self.module))


def followed(module: nn.Module) -> nn.Module:
    """Return the weights that a moving average follows: without the memory of a counterpart."""
    return module.weights if isinstance(module, Counterpart) else module


@dataclass
class Hosted:
    """The parts on this rank. Any of them may be absent."""

    members: Mapping[int, Part]
    trunk: Part | None  # shared by branches
    shared: Part | None  # the method's shared modules: a gate, an attention
    discriminator: Part | None  # the counterpart of all members: w, or another module in its place
    precision: Precision
    frozen: Part | None = None  # a trunk that is never trained: saved with the others, but not run in a step

    @property
    def parts(self) -> list[Part]:
        members, discriminator = [*self.members.values()], [self.discriminator] if self.discriminator else []
        return [*members, *self.common, *(part for own in members for part in own.attached), *discriminator]

    @property
    def learners(self) -> list[Part]:
        """Return the parts that the members' losses train."""
        return [part for part in self.of_members if part.learns]

    @property
    def of_members(self) -> list[Part]:
        """Return the members and the parts that they share."""
        return [*self.members.values(), *self.common]

    @property
    def common(self) -> list[Part]:
        """Return the parts that all members share, replicated on every rank with members."""
        return [part for part in (self.trunk, self.shared, self.frozen) if part is not None]

    @property
    def common_parameters(self) -> list[nn.Parameter]:
        return [p for part in self.common for p in part.module.parameters() if p.requires_grad]

    @property
    def averaged(self) -> "Hosted":
        """Return these parts with the moving averages of their weights."""

        def average_of(part: Part) -> Part:
            assert part.average is not None
            return replace(part, module=part.average.module)

        members = {index: average_of(part) for index, part in self.members.items()}
        trunk, shared = (part and average_of(part) for part in (self.trunk, self.shared))
        return replace(self, members=members, trunk=trunk, shared=shared)

    @property
    def shared_modules(self) -> nn.ModuleDict | None:
        module = self.shared.module if self.shared else None
        assert module is None or isinstance(module, nn.ModuleDict)
        return module

    @property
    def w(self) -> Counterpart | None:
        module = self.discriminator.module if self.discriminator else None
        assert module is None or isinstance(module, Counterpart)
        return module

    def member(self, index: int) -> Member:
        module = self.members[index].module
        assert isinstance(module, Member)
        return module

    @span("optimizer")
    def update(self, now: ScheduleValues) -> Values:
        """Take one optimizer step of every part that the members' losses train.

        Return the norms of the members' gradients, but only at logged steps: each norm takes four kernels.

        A part whose gradients overflow in fp16 skips its step, and the loss scale falls for all parts of this rank.
        Each rank has its own loss scale. The discriminator has none.
        """
        scaler = self.precision.scaler
        for part in self.learners:
            scaler.unscale_(part.optimizer)
        norms = {
            names.record(names.member(i), names.GRADIENT_NORM): gradient_norm(part.module)
            for i, part in self.members.items()
            if now.is_logged
        }
        for part in self.learners:
            part.update(now, scaler)
        scaler.update()
        return norms


def gradient_norm(module: nn.Module) -> Tensor:
    """Return the norm over all parameters; 0 if it is not finite, as in a step that fp16 skips.

    Any other overflow shows in the next loss, which ends the run.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nan_to_num(nn.utils.get_total_norm(gradients), nan=0.0, posinf=0.0)
