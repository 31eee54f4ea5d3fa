"""Ranks for tests: a function run by every rank of one group, as forked processes on gloo."""

import torch

from dicedist.benchmarks import processes
from dicedist.cluster.world import joined


def run_ranks(world_size, function, *arguments):
    """[function(rank, *arguments) for each rank], in one group; a single rank runs in this process."""
    if world_size == 1:
        return [function(0, *arguments)]
    return processes.run_ranks(world_size, on_rank, function, arguments)


def on_rank(rank, function, arguments):
    torch.set_num_threads(1)
    with joined(timeout=240):  # less than the limit of a test; a busy machine may keep a rank waiting for a minute
        return detached(function(rank, *arguments))


def detached(value):
    """Sends tensors as numpy arrays: a queue would send handles to memory that disappears with its process."""
    if isinstance(value, torch.Tensor):
        return Sent(value.numpy())
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(detached(item) for item in value)
    return value


class Sent:
    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        return torch.from_numpy, (self.array,)
