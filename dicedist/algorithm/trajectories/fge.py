"""Fast geometric ensembling (Garipov et al., 2018): after training, short triangular cycles, a sample at each minimum.

The cycles begin with a new optimizer after the end of the first schedule, as in Ashukha et al., 2020. FGE's authors
stop a longer schedule early and keep the optimizer's state.
"""

from dicedist.algorithm.schedules import Knots
from dicedist.algorithm.trajectories import Kind


class Trajectory(Kind):
    def __init__(
        self, samples: int, learning_rate: Knots, start: float, cycle_epochs: float, max_lr: float, min_lr: float
    ):
        super().__init__(samples, learning_rate)
        self.start, self.cycle_epochs, self.max_lr, self.min_lr = start, cycle_epochs, max_lr, min_lr
        self.restart = start
        self.moments = [start + cycle_epochs * (nth + 0.5) for nth in range(samples)]

    def rate(self, epoch: float) -> float:
        if epoch < self.start:
            return super().rate(epoch)
        share = (epoch - self.start) % self.cycle_epochs / self.cycle_epochs
        high = abs(1 - 2 * share)  # 1 at both ends of a cycle, 0 in its middle
        return self.max_lr * high + self.min_lr * (1 - high)
