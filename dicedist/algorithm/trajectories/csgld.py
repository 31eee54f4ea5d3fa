"""Cyclical stochastic gradient Langevin dynamics (Zhang et al., 2020): noise and samples at the end of cosine cycles.

theta <- theta - lr grad + sqrt(2 lr T/N) xi samples exp(-N L/T), L being the mean loss with weight decay. This holds
for SGD without momentum. Public implementations differ only in T: 0.0818 gives the noise of Ashukha et al., 2020 (782
batches of 64), and 1 gives the posterior. In the last `noise_epochs` epochs of every cycle each step adds noise, and
each of these epochs ends with a sample.
"""

import math

from dicedist.algorithm.trajectories import sse


class Trajectory(sse.Trajectory):
    plain_sgd = True

    def __init__(self, samples: int, cycle_epochs: float, max_lr: float, noise_epochs: int, temperature: float):
        super().__init__(samples, cycle_epochs, max_lr)
        if not 0 < noise_epochs <= cycle_epochs:
            raise ValueError(f"trajectory.noise_epochs={noise_epochs}: write a number from 1 to cycle_epochs")
        self.noise_epochs, self.temperature = noise_epochs, temperature
        self.moments = [
            cycle_epochs * (nth // noise_epochs + 1) - (noise_epochs - 1 - nth % noise_epochs) for nth in range(samples)
        ]

    def deviation(self, epoch: float, num_images: int) -> float:
        if epoch % self.cycle_epochs < self.cycle_epochs - self.noise_epochs:
            return 0.0
        return math.sqrt(2 * self.rate(epoch) * self.temperature / num_images)
