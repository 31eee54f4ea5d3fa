"""SWAG (Maddox et al., 2019): a Gaussian around the mean of the weights after every epoch, of low rank and diagonal.

theta = mean + sqrt(scale) (sqrt(variance) xi1 + D^T xi2 / sqrt(R - 1)). D holds the last R deviations, each from the
running mean at its time. With fewer deviations, R is their number. The batch norm statistics of a sample are recomputed
over the augmented training set. The moments are kept on the CPU in double precision, to avoid cancellation.

Legend: P parameters, R deviations.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dicedist.algorithm.member import Member
from dicedist.algorithm.networks.freezing import frozen_norms, to_training
from dicedist.algorithm.schedules import Knots
from dicedist.algorithm.trajectories import Collector, Images, Kind, Surroundings, TrainingSet, device_of

SMALLEST = 1e-30  # variance


class Trajectory(Kind):
    def __init__(self, samples: int, learning_rate: Knots, start: float, rank: int, scale: float):
        """start: the epoch after which weights are collected. scale: the factor on the variance."""
        super().__init__(samples, learning_rate)
        if rank < 2:
            raise ValueError(f"trajectory.rank={rank}: write a whole number from 2")
        self.start, self.rank, self.scale = start, rank, scale

    def collector(self, member: Member, surroundings: Surroundings) -> Collector:
        return Moments(sum(p.numel() for p in member.parameters()), self.start, self.rank, self.scale)


class Moments(Collector):
    count: Tensor
    mean_P: Tensor
    squares_P: Tensor  # the sum of squared deviations from the mean, by Welford's recurrence
    deviations_RP: Tensor

    def __init__(self, num_parameters: int, start: float, rank: int, scale: float):
        super().__init__()
        self.start, self.scale = start, scale
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean_P", torch.zeros(num_parameters, dtype=torch.float64))
        self.register_buffer("squares_P", torch.zeros(num_parameters, dtype=torch.float64))
        self.register_buffer("deviations_RP", torch.zeros(rank, num_parameters))

    def after_epoch(self, member: Member, epoch: float) -> None:
        if epoch > self.start:
            self.add(torch.cat([parameter.detach().flatten() for parameter in member.parameters()]).cpu())

    def add(self, weights_P: Tensor) -> None:
        before_P = weights_P.double() - self.mean_P
        self.count += 1
        self.mean_P += before_P / self.count
        after_P = weights_P.double() - self.mean_P
        self.squares_P += before_P * after_P
        self.deviations_RP.copy_(torch.cat([self.deviations_RP[1:], after_P[None].float()]))

    def draw(self, draws: torch.Generator) -> Tensor:
        held = min(int(self.count), len(self.deviations_RP))
        variance_P = (self.squares_P / self.count).clamp_min(SMALLEST)
        around_P = variance_P.sqrt() * torch.randn(len(self.mean_P), generator=draws, dtype=torch.float64)
        if held > 1:
            weights_R = torch.randn(held, generator=draws) / math.sqrt(held - 1)
            around_P += (weights_R @ self.deviations_RP[-held:]).double()
        return (self.mean_P + math.sqrt(self.scale) * around_P).float()

    def samples(self, member: Member, draws: Sequence[torch.Generator], data: TrainingSet) -> list[Member]:
        if not self.count:
            raise ValueError(f"no epoch ended after trajectory.start={self.start}: write more epochs, or lower it")
        found = []
        for one in draws:
            sample = copy.deepcopy(member)
            to_training(sample, frozen_norms(sample))
            with torch.no_grad():
                weights = self.draw(one).to(device_of(member)).split([p.numel() for p in sample.parameters()])
                for parameter, value in zip(sample.parameters(), weights, strict=True):
                    parameter.copy_(value.view(parameter.shape))
                renew_statistics(sample, data.augmented)
            found.append(sample)
        return found


def renew_statistics(member: Member, images: Images) -> None:
    """Recompute the statistics of batch norms in training mode: the mean over batches, each weighted by its size.

    torch's update_bn gives batches equal weights, so the inputs of a smaller last batch would count for more.
    """
    norms = [module for module in member.modules() if isinstance(module, _BatchNorm) and module.training]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    seen = 0
    for images_BCHW in images() if norms else ():
        seen += len(images_BCHW)
        for norm in norms:
            norm.momentum = len(images_BCHW) / seen
        member(images_BCHW)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
