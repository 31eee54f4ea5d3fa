"""Snapshot ensembles (Huang et al., 2017): a snapshot at the end of every cosine cycle, from which the next starts."""

import math

from dicedist.algorithm.trajectories import Kind


class Trajectory(Kind):
    def __init__(self, samples: int, cycle_epochs: float, max_lr: float):
        super().__init__(samples)
        self.cycle_epochs, self.max_lr = cycle_epochs, max_lr
        self.moments = [cycle_epochs * (nth + 1) for nth in range(samples)]

    def rate(self, epoch: float) -> float:
        return 0.5 * self.max_lr * (math.cos(math.pi * (epoch % self.cycle_epochs) / self.cycle_epochs) + 1)
