"""What a run prints at its start: which rank hosts what, what a step sends, and on a CPU how long it will take."""

import copy
import time

import torch

from dicedist.algorithm.parts import Hosted
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.config.schema import Config
from dicedist.console.lines import duration
from dicedist.console.tables import table
from dicedist.tracking.tracker import SilentTracker


def announce(
    config: Config,
    world: World,
    hosted: Hosted,
    exchange: Exchange,
    num_images: int,
    steps_left: int,
    tracker: SilentTracker,
) -> None:
    """All ranks must call it."""
    placement = exchange.placement
    own = sum(parameter.numel() for part in hosted.members.values() for parameter in part.module.parameters())
    records = world.control.report({"device": str(world.device), "host": world.host, "own": own})
    rows = [
        [rank, record["device"], record["host"], parts]
        for rank, (record, parts) in enumerate(zip(records, placement.parts, strict=False))  # the others get no records
    ]
    tracker.say(table(["rank", "device", "host", "parts"], rows))
    num_common = sum(parameter.numel() for parameter in hosted.common_parameters)
    num_own = sum(record["own"] for record in records) // placement.replicas
    sent = exchange.bytes_per_step(config.batch_size, num_common, num_own)
    listed = " + ".join(f"{name} {size:,}" for name, size in sent.items()) or "nothing"
    tracker.say(f"a step sends {listed} = {sum(sent.values()):,} bytes")
    tracker.say(
        f"{config.method.name} on {config.data.name}: {placement.num_members} x {config.network.name} "
        f"({config.structure}), {num_images:,} images, {steps_left:,} steps to go"
    )
    if world.device.type == "cpu":
        seconds = seconds_a_step(config, world, hosted, exchange)
        tracker.say(f"on this CPU that takes about {duration(seconds * steps_left)}")


def seconds_a_step(config: Config, world: World, hosted: Hosted, exchange: Exchange) -> float:
    """Estimated from one forward and backward pass of a copy, on all ranks at once as in training."""
    size, batch = config.data.size, -(-config.batch_size // exchange.placement.replicas)
    images = torch.zeros(batch, 3, size, size).to(memory_format=torch.channels_last)
    uncopied = {id(exchange): exchange}  # a synchronised batch norm refers to it
    copies = [copy.deepcopy(part.module, {**uncopied}) for part in [*hosted.members.values()][:1]]
    trunk = copy.deepcopy(hosted.trunk.module, uncopied) if hosted.trunk else torch.nn.Identity()
    world.control.barrier()
    started = time.monotonic()
    for member in copies:
        member(trunk(images)).sum().backward()
    seconds = (time.monotonic() - started) * max(1, len(hosted.members))
    return world.control.agree(round(1000 * seconds)) / 1000
