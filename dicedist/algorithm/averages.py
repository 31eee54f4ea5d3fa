"""Moving averages of weights."""

import copy
from itertools import chain

import torch
from torch import Tensor, nn


class MovingAverage(nn.Module):
    """A moving average of a module's weights and running statistics; `follow` moves it towards the module.

    decay: the weight of the old average in the new one. warms_up: the decay rises from 0, so that the first
    1 / (1 - decay) steps have equal weights. Build the average when the module is on its device. The step counter stays
    on the CPU: torch's AveragedModel copies it to the device in every step, and the host waits for the copy.
    """

    n_averaged: Tensor

    def __init__(self, module: nn.Module, decay: float, warms_up: bool = False):
        super().__init__()
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.decay, self.warms_up = decay, warms_up
        self.register_buffer("n_averaged", torch.tensor(0))

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        tensors = [[*chain(own.parameters(), own.buffers())] for own in (self.module, module)]
        averages, current = ([tensor for tensor in own if tensor.is_floating_point()] for own in tensors)
        torch._foreach_lerp_(averages, current, 1 - self.next_decay())
        own_counters, counters = ([tensor for tensor in own if not tensor.is_floating_point()] for own in tensors)
        if counters:
            torch._foreach_copy_(own_counters, counters)
        self.n_averaged += 1

    def next_decay(self) -> float:
        steps = int(self.n_averaged)
        if steps == 0:
            return 0.0
        return min(1 - 1 / (steps + 1), self.decay) if self.warms_up else self.decay
