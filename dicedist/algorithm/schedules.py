"""The schedules of training, as pure functions of the (fractional) epoch."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dicedist.config.schema import Config

Knots = Sequence[Sequence[float]]  # [[epoch, value], ...], epochs ascending from 0
COMPRESS_LATE: Knots = ((0, 100), (100, 10), (300, 4))  # log(beta) by epochs of 300: docs/results/compression.md
COLD = 0.01  # the factor on the learning rate at the start of a warm-up
RISE = 0.3  # the share of a run in which a one-cycle rises, if warmup_epochs is 0
LOW, LOWEST = 1 / 25, 1e-4 / 25  # the factors at which a one-cycle begins and ends: torch's OneCycleLR


@dataclass(frozen=True)
class ScheduleValues:
    """The values of every schedule at one step."""

    learning_rate: float
    log_beta: float
    ramp_up: float
    covariance: float
    epoch: float = 0.0  # of the reference run, for a term's own schedule
    is_logged: bool = True  # the step ends an interval of log.every_steps: costly values are computed

    @property
    def compression_ceb(self) -> float:
        """Return 1 / beta_ceb, the weight of the KL in VCEB."""
        return math.exp(-self.log_beta)

    @property
    def compression_ib(self) -> float:
        """Return 1 / beta_ib with beta_ib = beta_ceb + 1, the weight of the KL in VIB."""
        return 1.0 / (math.exp(self.log_beta) + 1.0)


class Schedules:
    def __init__(self, config: Config, rate: Callable[[float], float] | None = None, steps_per_epoch: int = 1):
        """rate: a trajectory's learning rate by epoch of the reference run; it replaces the optimizer's."""
        self.config, self.optimizer, self.epochs = config.schedules, config.optimizer, config.epochs
        self.own_rate, self.steps_per_epoch, self.log_every = rate, steps_per_epoch, config.log.every_steps
        self.last_step = min(config.epochs * steps_per_epoch, config.max_steps or config.epochs * steps_per_epoch)
        self.rates = learning_rate_knots(config.schedules.learning_rate, config.optimizer.lr)
        log_beta = config.bottleneck.log_beta
        self.log_beta: Knots = COMPRESS_LATE if log_beta == "auto" else log_beta
        self.pace = config.schedules.reference_epochs / config.epochs if config.schedules.scale else 1.0

    def at_step(self, epoch: int, step: int) -> ScheduleValues:
        """Return the values at a step of an epoch."""
        done = epoch * self.steps_per_epoch + step + 1
        is_logged = done % self.log_every == 0 or done == self.last_step
        return replace(self.at(epoch + step / self.steps_per_epoch), is_logged=is_logged)

    def at(self, epoch: float) -> ScheduleValues:
        rate = self.learning_rate(epoch)
        epoch = epoch * self.pace
        start, end = self.config.covariance
        return ScheduleValues(
            learning_rate=rate,
            log_beta=piecewise_linear(self.log_beta, epoch),
            ramp_up=ramp_up(epoch, self.config.ramp_up),
            covariance=piecewise_linear([[start, 0.0], [end, 1.0]], epoch),
            epoch=epoch,
        )

    def learning_rate(self, epoch: float) -> float:
        """Return the learning rate of the heads. Knots count epochs of the reference run, warm-ups of this run."""
        if self.own_rate is not None:
            return self.own_rate(epoch * self.pace)
        shape, warmup, peak = self.optimizer.schedule, self.optimizer.warmup_epochs, self.rates[0][1]
        if shape == "onecycle":
            return peak * one_cycle(epoch / self.epochs, warmup / self.epochs or RISE)
        if shape == "step":
            return warm_up(epoch, warmup) * piecewise_constant(self.rates, epoch * self.pace)
        if shape == "knots":
            return warm_up(epoch, warmup) * piecewise_linear(self.rates, epoch * self.pace)
        return peak * warm_up(epoch, warmup) * DECLINES[shape](share(epoch, warmup, self.epochs))


def share(epoch: float, start: float, end: float) -> float:
    """Return the share of the way from start to end, 0 to 1."""
    return min(1.0, max(0.0, (epoch - start) / (end - start)))


def warm_up(epoch: float, end: float) -> float:
    return COLD + (1.0 - COLD) * epoch / end if epoch < end else 1.0


def half_cosine(share: float) -> float:
    """Fall from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * share))


def one_cycle(done: float, rise: float) -> float:
    """Return the factor on the highest learning rate (Smith and Topin, 2018); the momentum does not change."""
    if done < rise:
        return 1.0 + (LOW - 1.0) * half_cosine(done / rise)
    return LOWEST + (1.0 - LOWEST) * half_cosine(share(done, rise, 1.0))


DECLINES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": half_cosine,
}


def learning_rate_knots(tables: dict[str, list[Any]], choice: float | str) -> Knots:
    """Return the table of this name, or the paper's table scaled to start at the given number."""
    if isinstance(choice, str):
        return tables[choice]
    paper = tables["paper"]
    return [[epoch, value * choice / paper[0][1]] for epoch, value in paper]


def piecewise_constant(knots: Knots, epoch: float) -> float:
    return knots[max(0, bisect_right([knot[0] for knot in knots], epoch) - 1)][1]


def piecewise_linear(knots: Knots, epoch: float) -> float:
    after = bisect_right([knot[0] for knot in knots], epoch)
    if after == 0 or after == len(knots):
        return knots[max(0, after - 1)][1]
    (start, low), (end, high) = knots[after - 1], knots[after]
    return low + (high - low) * (epoch - start) / (end - start)


def ramp_up(epoch: float, end: float) -> float:
    """Return exp(-5 (1 - t/end)^2), then 1: the ramp-up of the co-distillation literature."""
    return math.exp(-5.0 * (1.0 - epoch / end) ** 2) if epoch < end else 1.0
