"""The lines that a run prints at its start: the placement, the traffic of a step, on a CPU the time it will take."""

from collections.abc import Mapping

from dicedist.algorithm.step import Step
from dicedist.cluster.devices import MIB
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.console.lines import duration, plural
from dicedist.console.tables import table
from dicedist.data.sources import Source
from dicedist.evaluation.teacher import Teacher
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.forecast import seconds_to_go
from dicedist.training.job import Job

SPLITS = ("train", "val", "test")
MOST_ROWS, LISTED = 20, 5  # classes in the table, in a warning


def announce(
    job: Job,
    world: World,
    step: Step,
    exchange: Exchange,
    teacher: Teacher | None,
    footprint: Mapping[str, int],
    steps_left: int,
    tracker: SilentTracker,
) -> None:
    """All ranks must call it. footprint: bytes of this rank's parts, by kind."""
    config, placement, source, hosted = job.config, job.placement, job.source, step.hosted
    own = sum(parameter.numel() for part in hosted.members.values() for parameter in part.module.parameters())
    of_w = sum(p.numel() for p in hosted.w.parameters()) if hosted.w else 0
    card = {"device": str(world.device), "host": world.host, "own": own, "w": of_w, "footprint": {**footprint}}
    records = world.control.report(card)
    rows = [
        [rank, record["device"], record["host"], parts]
        for rank, (record, parts) in enumerate(zip(records, placement.parts, strict=False))  # the others get no records
    ]
    tracker.say(table(["rank", "device", "host", "parts"], rows))
    footprints: list[dict[str, int]] = [record["footprint"] for record in records]
    fullest = max(footprints, key=lambda sizes: sum(sizes.values()), default={})
    listed = " + ".join(f"{name} {size / MIB:,.1f}" for name, size in fullest.items())
    tracker.say(
        f"a rank's weights, gradients and states take at most {listed} = {sum(fullest.values()) / MIB:,.1f} MiB"
    )
    num_common = sum(parameter.numel() for parameter in hosted.common_parameters)
    num_own = sum(record["own"] for record in records) // placement.replicas
    num_w = max((record["w"] for record in records), default=0) * config.redundancy.num_steps
    sent = exchange.bytes_per_step(config.batch_size, num_common, num_own, num_w)
    if sent:
        listed = " + ".join(f"{name} {size:,}" for name, size in sent.items())
        tracker.say(f"a step sends {listed} = {sum(sent.values()):,} bytes")
    tracker.say(
        f"{config.method.name} on {config.data.name}: {placement.num_members} x {config.network.label} "
        f"({config.structure}), {len(source.train):,} {source.kind}, {plural(steps_left, 'step')} to go"
    )
    if teacher is not None:
        members = f"{plural(len(teacher), 'member')} of {config.teacher.run}"
        tracker.say(f"taught by the {members}, step {teacher.ensemble.about.step}")
    tracker.say(class_counts(source))
    if job.method.estimator is not None:
        for line in too_small(source, config.redundancy.memory):
            tracker.warn(line)
    if world.device.type == "cpu":
        left = duration(seconds_to_go(job, world, exchange, teacher, steps_left))
        tracker.say(f"on this CPU training and evaluation take about {left}")


def class_counts(source: Source) -> str:
    """Count the inputs of every class; of many classes the smallest and largest; in one line if all have as many."""
    counts = {split: getattr(source, split).labels_N.bincount(minlength=source.num_classes) for split in SPLITS}
    train_K = counts["train"]
    if train_K.min() == train_K.max():
        return f"{source.num_classes:,} classes, {int(train_K[0]):,} training {source.kind} of each"
    order = train_K.argsort(stable=True).tolist()
    shown = order if len(order) <= MOST_ROWS else [*order[: MOST_ROWS // 2], *order[-MOST_ROWS // 2 :]]
    rows = [[source.class_names[k], *(int(counts[split][k]) for split in SPLITS)] for k in shown]
    left_out = len(order) - len(shown)
    note = f"\n(and {left_out:,} classes between them)" if left_out else ""
    return table(["class", *SPLITS], rows) + note


def too_small(source: Source, memory: int) -> list[str]:
    """Warn of classes with no more inputs than the class memory keeps: w would meet the same partners all the time."""
    counts_K = source.train.labels_N.bincount(minlength=source.num_classes)
    small = (counts_K <= memory).nonzero().flatten().tolist()
    if not small:
        return []
    named = ", ".join(f"{source.class_names[k]} ({int(counts_K[k])})" for k in small[:LISTED])
    more = f" and {len(small) - LISTED} more" if len(small) > LISTED else ""
    return [
        f"{len(small)} of {source.num_classes} classes have no more training "
        f"{source.kind} than redundancy.memory={memory} keeps of each: {named}{more}; the discriminator meets the same "
        "partners again and again, so collect more, or lower redundancy.memory"
    ]
