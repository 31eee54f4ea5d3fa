"""The lines that a run prints at its start (what, where, on which data, how long) and at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from dicedist.algorithm.step import Step
from dicedist.cluster.devices import MIB
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.config import Config
from dicedist.console.lines import duration, plural
from dicedist.console.tables import table
from dicedist.data.sources import Source
from dicedist.evaluation.promises import rests_on_few
from dicedist.evaluation.teacher import Teacher
from dicedist.runs.run import Run
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.forecast import seconds_to_go
from dicedist.training.job import Job

SPLITS = ("train", "val", "test")
MOST_ROWS, LISTED = 20, 5  # classes in the table, in a warning
MOST_NAMED = 8  # ranks whose parts the first line lists


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
    """Print the start of a run; with log.verbose also memory, traffic and the size of each class.

    All ranks call this. footprint: bytes of this rank's parts, by kind.
    """
    config, placement, source, hosted = job.config, job.placement, job.source, step.hosted
    own = sum(parameter.numel() for part in hosted.members.values() for parameter in part.module.parameters())
    of_w = sum(p.numel() for p in hosted.w.parameters()) if hosted.w else 0
    card = {"device": str(world.device), "host": world.host, "own": own, "w": of_w, "footprint": {**footprint}}
    records = world.control.report(card)
    network = f"{placement.num_members} x {config.network.label} ({config.structure})"
    tracker.say(f"{config.method.name} on {config.data.name}: {network}, {where(records, placement.parts)}")
    tracker.say(sizes(source))
    if teacher is not None:
        members = f"{plural(len(teacher), 'member')} of {config.teacher.run}"
        tracker.say(f"taught by the {members}, step {teacher.ensemble.about.step}")
    if config.log.verbose:
        num_common = sum(parameter.numel() for parameter in hosted.common_parameters)
        num_own = sum(record["own"] for record in records) // placement.replicas
        num_w = max((record["w"] for record in records), default=0) * config.redundancy.num_steps
        sent = exchange.bytes_per_step(config.batch_size, num_common, num_own, num_w)
        for text in details(records, placement.parts, sent, source):
            tracker.say(text)
    if line := few_held_out(source, config):
        tracker.warn(line)
    if job.method.estimator is not None:
        for line in too_small(source, config.redundancy.memory):
            tracker.warn(line)
    takes = plural(steps_left, "step")
    if world.device.type == "cpu":
        takes += f", about {duration(seconds_to_go(job, world, exchange, teacher, steps_left))} with evaluation"
    tracker.say(f"{takes}; Ctrl-C saves, and the same command continues")


def last_lines(run: Run) -> str:
    """Return the path of the report, and the commands that users need next."""
    commands = (f"show {run}", f"predict run={run} INPUTS", f"export run={run}")
    return f"done: {run.report_file}\nnext: {', '.join(f'dicedist {command}' for command in commands)}"


def folder_moved(run: Run, done: int, safe: bool) -> str:
    """Return the message about a renamed or removed run folder. safe: the last checkpoint is saved there."""
    gone = f"renamed to {run}" if run.directory.is_dir() else "removed"
    kept = "saved there; rename it back, and the same command continues the run" if safe else "nothing is saved"
    return f"{run.moved_from} was {gone} while it trained: stopped after step {done}, {kept}"


def where(records: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> str:
    """Return the devices, and the parts of each rank if there are few ranks. Only rank 0 has records."""
    kinds = sorted({record["device"].partition(":")[0] for record in records})
    if len(parts) == 1:
        return f"one process on {kinds[0]}"
    nodes = len({record["host"] for record in records})
    on = f"{len(records)} ranks on {' and '.join(kinds)}" + (f" of {nodes} nodes" if nodes > 1 else "")
    return f"{on} ({' | '.join(parts)})" if len(records) <= MOST_NAMED else on


def sizes(source: Source) -> str:
    """Return the numbers of inputs, and of training inputs in the smallest and largest class."""
    counts_K = source.train.labels_N.bincount(minlength=source.num_classes)
    low, high = int(counts_K.min()), int(counts_K.max())
    each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    splits = f"{len(source.val):,} for validation, {len(source.test):,} for the test"
    return f"{len(source.train):,} {source.kind} of {source.num_classes:,} classes ({each} of each), {splits}"


def details(
    records: Sequence[Mapping[str, Any]], parts: Sequence[str], sent: Mapping[str, int], source: Source
) -> list[str]:
    """Return a table of ranks, the largest memory of a rank, the bytes of a step, and the size of each class."""
    rows = [
        [rank, record["device"], record["host"], part]
        for rank, (record, part) in enumerate(zip(records, parts, strict=False))
    ]
    footprints: list[dict[str, int]] = [record["footprint"] for record in records]
    fullest = max(footprints, key=lambda kinds: sum(kinds.values()), default={})
    listed = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in fullest.items())
    texts = [
        table(["rank", "device", "host", "parts"], rows),
        f"memory per rank: at most {sum(fullest.values()) / MIB:,.1f} MiB ({listed})",
    ]
    if sent:
        listed = ", ".join(f"{name} {size:,}" for name, size in sent.items())
        texts.append(f"a step sends {sum(sent.values()):,} bytes ({listed})")
    return [*texts, class_counts(source)]


def class_counts(source: Source) -> str:
    """Return a table of the inputs of every class; with many classes only the smallest and largest."""
    counts = {split: getattr(source, split).labels_N.bincount(minlength=source.num_classes) for split in SPLITS}
    order = counts["train"].argsort(stable=True).tolist()
    shown = order if len(order) <= MOST_ROWS else [*order[: MOST_ROWS // 2], *order[-MOST_ROWS // 2 :]]
    rows = [[source.class_names[k], *(int(counts[split][k]) for split in SPLITS)] for k in shown]
    left_out = len(order) - len(shown)
    note = f"\n(and {left_out:,} classes between them)" if left_out else ""
    return table(["class", *SPLITS], rows) + note


def few_held_out(source: Source, config: Config) -> str | None:
    """Return a warning if the validation set is too small for the calibration."""
    counts_K = source.val.labels_N.bincount(minlength=source.num_classes)
    if not len(source.val) or not config.evaluate.test or config.calibration.source == "test":
        return None
    line = rests_on_few(len(source.val), int(counts_K.min()), f"validation {source.kind}", config.calibration)
    if line is None:
        return None
    larger = "collect more" if config.data.val_fraction == "auto" else "write data.val_fraction=auto, or collect more"
    return f"{line}: {larger}"


def too_small(source: Source, memory: int) -> list[str]:
    """Return a warning if the class memory holds all inputs of a class: w would see the same partners all the time."""
    counts_K = source.train.labels_N.bincount(minlength=source.num_classes)
    small = (counts_K <= memory).nonzero().flatten().tolist()
    if not small:
        return []
    named = ", ".join(f"{source.class_names[k]} ({int(counts_K[k])})" for k in small[:LISTED])
    more = f" and {len(small) - LISTED} more" if len(small) > LISTED else ""
    return [
        f"{len(small)} of {source.num_classes} classes have no more training "
        f"{source.kind} than redundancy.memory={memory} keeps of each: {named}{more}; the discriminator sees the same "
        "partners again and again, so collect more, or lower redundancy.memory"
    ]
