"""Members that share a device: one after another, on a stream each, or as one grouped network.

Only the forward and backward passes of the encoders are timed. `ensemble.batched` chooses between the first and the
last; streams are measured on a GPU only for comparison.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dicedist.algorithm import networks
from dicedist.algorithm.grouped import grouped
from dicedist.benchmarks.building import plan_of, random_batch, with_size
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.config import Config


def batched(config: Config) -> list[dict[str, Any]]:
    device, plan = pick_device(), plan_of(with_size(config))
    size, shape = plan.num_members, plan.input_shape
    members = [networks.build(config.network, shape).to(device) for _ in range(size)]
    members = [member.to(memory_format=torch.channels_last) for member in members]
    (images,) = random_batch(config, device).images
    alternatives: dict[str, Callable[[], object]] = {
        "one after another": partial(in_turn, members, images),
        "grouped": partial(learn, grouped(members), torch.cat([images] * size, 1)),
    }
    if device.type == "cuda":
        alternatives["on streams"] = partial(on_streams, members, images, [torch.cuda.Stream() for _ in members])
    return compare(alternatives, "one after another", rounds=5)


def learn(network: nn.Module, images: Tensor) -> None:
    network.zero_grad(set_to_none=True)
    network(images).square().sum().backward()


def in_turn(members: Sequence[nn.Module], images: Tensor) -> None:
    for member in members:
        learn(member, images)


def on_streams(members: Sequence[nn.Module], images: Tensor, streams: Sequence[torch.cuda.Stream]) -> None:
    """Run each member on its own stream; torch runs backward on the streams of forward."""
    for member, stream in zip(members, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            learn(member, images)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
