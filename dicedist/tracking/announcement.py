"""What a run prints at its start: which rank hosts what, what a step sends, and on a CPU how long it will take."""

from dicedist.algorithm.step import Step
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.config.schema import Config
from dicedist.console.lines import duration, plural
from dicedist.console.tables import table
from dicedist.data.sources import Source
from dicedist.tracking.forecast import seconds_to_go
from dicedist.tracking.tracker import SilentTracker


def announce(
    config: Config,
    world: World,
    step: Step,
    exchange: Exchange,
    source: Source,
    steps_left: int,
    tracker: SilentTracker,
) -> None:
    """All ranks must call it."""
    placement, hosted = exchange.placement, step.hosted
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
    if sent:
        listed = " + ".join(f"{name} {size:,}" for name, size in sent.items())
        tracker.say(f"a step sends {listed} = {sum(sent.values()):,} bytes")
    tracker.say(
        f"{config.method.name} on {config.data.name}: {placement.num_members} x {config.network.label} "
        f"({config.structure}), {len(source.train):,} images, {plural(steps_left, 'step')} to go"
    )
    if world.device.type == "cpu":
        left = duration(seconds_to_go(config, world, step, source, steps_left))
        tracker.say(f"on this CPU training and evaluation take about {left}")
