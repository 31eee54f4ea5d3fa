"""Ensembles along a trajectory: one training of a member leaves several predictors, its samples.

sse, fge and csgld keep the weights at certain epochs; swag, vi and kfac_laplace draw weights after training. All kinds
train with cross-entropy only. M members and S samples make M S predictors. Evaluation, prediction and export treat each
predictor as an ordinary member. Epochs are counted in the reference run (schedules.reference_epochs); a run of another
length is scaled to it.

The module of a kind defines a class `Trajectory`, whose options come from the config:

    class Trajectory(Kind):
        def rate(self, epoch): ...              # the learning rate
        moments = [...]                         # epochs after which a member's weights are kept as a sample
        def collector(self, member): ...        # additional state, saved with the member
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dicedist.algorithm.by_name import construct
from dicedist.algorithm.member import Member
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import Knots, piecewise_linear
from dicedist.config.schema import sample_name

Images = Callable[[], Iterator[Tensor]]
Labeled = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Surroundings:
    """The facts about a run that a trajectory needs."""

    num_images: int
    weight_decay: float


@dataclass(frozen=True)
class TrainingSet:
    """Batches for the work after the last step."""

    augmented: Images
    plain: Labeled
    held_out: Labeled


class Collector(nn.Module):
    """State that a member collects during training, saved with the checkpoint. By default the hooks do nothing."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return no_optimizer()

    def encoder(self, member: Member) -> nn.Module | None:
        """Return the module that encodes in place of the member during training, if any."""
        return None

    def before_step(self, epoch: float, draws: torch.Generator) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_epoch(self, member: Member, epoch: float) -> None:
        """epoch: the epoch that has ended."""

    def samples(self, member: Member, draws: Sequence[torch.Generator], data: TrainingSet) -> list[Member]:
        """Draw one sample per generator, after the last step."""
        raise NotImplementedError


class Kind:
    """One kind of trajectory. By default the learning rate follows `learning_rate`, linearly between its knots."""

    moments: Sequence[float] = ()
    restart: float | None = None  # the epoch at which the optimizer is reset
    tunes: bool = False  # needs held-out images
    plain_sgd: bool = False  # its noise is derived for SGD without momentum

    def __init__(self, samples: int, learning_rate: Knots = ()):
        if samples < 1:
            raise ValueError(f"trajectory.samples={samples}: write a whole number from 1")
        self.samples, self.knots = samples, learning_rate

    def rate(self, epoch: float) -> float:
        return piecewise_linear(self.knots, epoch)

    def deviation(self, epoch: float, num_images: int) -> float:
        """Return the deviation of the noise that is added to every weight after a step at this epoch."""
        return 0.0

    def collector(self, member: Member, surroundings: Surroundings) -> Collector | None:
        return None


@dataclass(frozen=True)
class Clock:
    pace: float  # epochs of the reference run per epoch of this run
    steps_per_epoch: int

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch * self.pace

    def step(self, epoch: float) -> int:
        return round(epoch / self.pace * self.steps_per_epoch)


class Trajectories:
    """The trajectories of the members on this rank. Without a kind there are no collectors and no samples."""

    def __init__(
        self, kind: Kind | None, hosted: Hosted, clock: Clock, total_steps: int, surroundings: Surroundings, seed: int
    ):
        self.kind, self.hosted, self.clock, self.seed, self.surroundings = kind, hosted, clock, seed, surroundings
        self.samples: dict[int, Part] = {}  # by predictor
        self.collectors: dict[int, Part] = {}  # by member
        self.steps = {clock.step(epoch): nth for nth, epoch in enumerate(kind.moments if kind else ())}
        if kind is None:
            return
        if len(self.steps) < len(kind.moments) or max(self.steps, default=0) > total_steps or 0 in self.steps:
            raise ValueError(
                f"trajectory.samples={kind.samples}: the run of {total_steps} steps ends before the last sample, or "
                "two samples fall on one step; write more epochs, shorter cycles or fewer samples"
            )
        for index in hosted.members:
            collector = kind.collector(hosted.member(index), surroundings)
            if collector is not None:
                self.collectors[index] = Part(f"member-{index}-collector", collector, collector.build_optimizer())

    @property
    def parts(self) -> list[Part]:
        return [*self.collectors.values(), *self.samples.values()]

    @property
    def encoders(self) -> dict[int, nn.Module]:
        """Return by member the module that encodes in its place."""
        found = {i: collector_of(part).encoder(self.hosted.member(i)) for i, part in self.collectors.items()}
        return {index: encoder for index, encoder in found.items() if encoder is not None}

    def expect(self, files: Sequence[str]) -> None:
        """Create the samples that a checkpoint with these files holds, so that their weights can be loaded."""
        for index in self.hosted.members if self.kind else ():
            for nth in range(self.kind.samples if self.kind else 0):
                if f"{sample_name(index, nth)}.safetensors" in files:
                    self.keep(index, nth, copy.deepcopy(self.hosted.member(index)))

    def before_step(self, done: int) -> None:
        epoch = self.clock.epoch(done)
        for index, part in self.collectors.items():
            draws = generator(device_of(self.hosted.member(index)), self.seed, "trajectory", done, index)
            collector_of(part).before_step(epoch, draws)
        if self.kind is not None and self.kind.restart is not None and done == self.clock.step(self.kind.restart):
            for part in self.hosted.members.values():
                part.optimizer.state.clear()

    def after_step(self, done: int) -> None:
        """done: the number of steps, including this one."""
        if self.kind is None:
            return
        for part in self.collectors.values():
            collector_of(part).after_step(part.optimizer)
        deviation = self.kind.deviation(self.clock.epoch(done - 1), self.surroundings.num_images)
        for index in self.hosted.members:
            member = self.hosted.member(index)
            if deviation:
                disturb(member, deviation, generator(device_of(member), self.seed, "langevin", done, index))
            if done % self.clock.steps_per_epoch == 0 and index in self.collectors:
                collector_of(self.collectors[index]).after_epoch(member, self.clock.epoch(done))
            if done in self.steps:
                self.keep(index, self.steps[done], copy.deepcopy(member))

    def finish(self, data: TrainingSet) -> None:
        """Draw the samples that were not kept during training. Drawing again gives the same samples."""
        if self.kind is None or len(self.samples) == self.kind.samples * len(self.hosted.members):
            return
        for index, part in self.collectors.items():
            member = self.hosted.member(index)
            draws = [generator("cpu", self.seed, "sample", index, nth) for nth in range(self.kind.samples)]
            for nth, sample in enumerate(collector_of(part).samples(member, draws, data)):
                self.keep(index, nth, sample)

    def keep(self, index: int, nth: int, member: Member) -> None:
        assert self.kind is not None
        part = Part(sample_name(index, nth), member.requires_grad_(False), no_optimizer())
        self.samples[index * self.kind.samples + nth] = part


def collector_of(part: Part) -> Collector:
    assert isinstance(part.module, Collector)
    return part.module


def no_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}], lr=0.0)


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


@torch.no_grad()
def disturb(module: nn.Module, deviation: float, draws: torch.Generator) -> None:
    for parameter in module.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=draws, device=draws.device), alpha=deviation)


def build(options: Mapping[str, Any]) -> Kind | None:
    """Build the kind that the config names, with its options; None for ordinary training."""
    options = dict(options)
    name = options.pop("kind")
    if name == "none":
        return None
    kind = construct(__name__, name, "Trajectory", options, f"trajectory.kind={name}", ["none"])
    assert isinstance(kind, Kind)
    return kind
