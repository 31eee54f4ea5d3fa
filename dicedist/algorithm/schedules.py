"""The schedules of training, as pure functions of the epoch, which may be fractional."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from dicedist.config.schema import Config, SchedulesConfig

Knots = Sequence[Sequence[float]]  # [[epoch, value], ...], epochs ascending from 0


@dataclass(frozen=True)
class Moment:
    """The values of every schedule at one step."""

    learning_rate: float
    log_beta: float
    ramp_up: float
    covariance: float

    @property
    def compression_ceb(self) -> float:
        """1 / beta_ceb, the weight of the KL in VCEB."""
        return math.exp(-self.log_beta)

    @property
    def compression_ib(self) -> float:
        """1 / beta_ib with beta_ib = beta_ceb + 1, the weight of the KL in VIB."""
        return 1.0 / (math.exp(self.log_beta) + 1.0)


class Schedules:
    def __init__(self, config: SchedulesConfig, learning_rate: float | str, log_beta: Knots, epochs: int):
        self.config = config
        self.learning_rate = learning_rate_knots(config.learning_rate, learning_rate)
        self.log_beta = log_beta
        self.pace = config.reference_epochs / epochs if config.scale else 1.0

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(config.schedules, config.optimizer.lr, config.bottleneck.log_beta, config.epochs)

    def at(self, epoch: float) -> Moment:
        epoch = epoch * self.pace
        start, end = self.config.covariance
        return Moment(
            learning_rate=piecewise_constant(self.learning_rate, epoch),
            log_beta=piecewise_linear(self.log_beta, epoch),
            ramp_up=ramp_up(epoch, self.config.ramp_up),
            covariance=piecewise_linear([[start, 0.0], [end, 1.0]], epoch),
        )


def learning_rate_knots(tables: dict[str, list[Any]], choice: float | str) -> Knots:
    """The table of that name, or the paper's table scaled to start at the given number."""
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
    """exp(-5 (1 - t/end)^2), then 1: the ramp-up of the co-distillation literature."""
    return math.exp(-5.0 * (1.0 - epoch / end) ** 2) if epoch < end else 1.0
