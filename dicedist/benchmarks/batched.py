"""Whether members that share a device are faster as one batched network: grouped convolutions, one group per member.

Only the forward and backward passes of the encoders. The step trains members in turn; this shows where that is slower.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dicedist.algorithm import networks
from dicedist.algorithm.networks import Network
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.cluster.placement import DEFAULT_SIZE
from dicedist.config import Config


def batched(config: Config, rounds: int = 5) -> list[dict[str, Any]]:
    size = config.ensemble.size if isinstance(config.ensemble.size, int) else DEFAULT_SIZE
    device = pick_device()
    members = [networks.build(config.network).to(device).to(memory_format=torch.channels_last) for _ in range(size)]
    together = grouped(members).to(device).to(memory_format=torch.channels_last)
    shape = (config.batch_size, 3, config.data.size, config.data.size)
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    repeated = images.repeat(1, size, 1, 1).to(memory_format=torch.channels_last)

    def separately() -> None:
        for member in members:
            learn(member, images)

    alternatives: dict[str, Callable[[], object]] = {
        "one after the other": separately,
        "grouped": partial(learn, together, repeated),
    }
    return compare(alternatives, "one after the other", rounds)


def learn(network: Network, images: torch.Tensor) -> None:
    network.zero_grad(set_to_none=True)
    network(images).square().sum().backward()


def grouped(members: list[Network]) -> Network:
    """One network with all members' weights side by side: it maps [B, M 3, H, W] to [B, M D], one slice per member."""
    together = copy.deepcopy(members[0])
    for name, layer in together.named_modules():
        same = [dict(member.named_modules())[name] for member in members]
        if isinstance(layer, nn.Conv2d):
            layer.groups *= len(members)
            layer.in_channels, layer.out_channels = layer.in_channels * len(members), layer.out_channels * len(members)
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_features *= len(members)
            for buffer in ("running_mean", "running_var"):
                setattr(layer, buffer, torch.cat([getattr(one, buffer) for one in same]))
        for parameter, _ in list(layer.named_parameters(recurse=False)):
            setattr(layer, parameter, nn.Parameter(torch.cat([getattr(one, parameter).detach() for one in same])))
    return together
