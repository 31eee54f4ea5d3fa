"""The learning of w as one CUDA graph: the kernels of all its steps become a single launch.

A graph reads and writes the same memory in every replay, and keeps the Python numbers of its recording. So inputs and
the one scheduled value are copied into tensors that the graph owns. Random numbers come from generators that are
registered with the graph and seeded by key before every replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.messages import Values
from dicedist.algorithm.schedules import ScheduleValues

WARM_UP = 3  # batches before the recording: libraries allocate memory, which a graph may not; optimizers create states
Learn = Callable[[Features, Tensor, ScheduleValues, Sequence[torch.Generator]], Values]


class Recorded:
    """Learns by a graph from batches of the first size that it sees, and kernel by kernel from other batches."""

    def __init__(self, learn: Learn):
        self.learn, self.size, self.seen = learn, 0, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, features: Features, labels_B: Tensor, now: ScheduleValues, seeds: Sequence[int]) -> Values:
        self.size = self.size or len(labels_B)
        if len(labels_B) != self.size or self.seen < WARM_UP:
            self.seen += len(labels_B) == self.size
            draws = [torch.Generator(labels_B.device).manual_seed(seed) for seed in seeds]
            return self.learn(features, labels_B, now, draws)
        if self.graph is None:
            self.graph = self.record(features, labels_B, now, len(seeds))
        for own, given in zip(self.inputs, (features.means_MBD, features.scales_MBD, labels_B), strict=True):
            own.copy_(given)
        self.covariance.fill_(now.covariance)
        for generator, seed in zip(self.draws, seeds, strict=True):
            generator.manual_seed(seed)
        self.graph.replay()
        return {name: value.clone() for name, value in self.values.items()}  # the next replay overwrites them

    def record(
        self, features: Features, labels_B: Tensor, now: ScheduleValues, num_generators: int
    ) -> torch.cuda.CUDAGraph:
        """Record the graph; the recording computes nothing."""
        self.inputs = [of.clone() for of in (features.means_MBD, features.scales_MBD, labels_B)]
        self.covariance = torch.zeros((), device=labels_B.device)
        self.draws = [torch.Generator(labels_B.device) for _ in range(num_generators)]
        graph, (means_MBD, scales_MBD, own_labels_B) = torch.cuda.CUDAGraph(), self.inputs
        for generator in self.draws:
            graph.register_generator_state(generator)
        scheduled = replace(now, covariance=cast(float, self.covariance))
        # Other threads, such as those of NCCL and DALI, may use the GPU during the recording.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.values = self.learn(Features(means_MBD, scales_MBD), own_labels_B, scheduled, self.draws)
        return graph
