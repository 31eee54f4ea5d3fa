"""What each method costs compared with independent training: its step on the same network, members and images.

A step of a trajectory is one of its last epoch, where noise is added and posteriors are drawn from; what it does once,
after training, is not in it.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dicedist.algorithm import trajectories
from dicedist.algorithm.batch import Batch
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.trajectories import Clock, Surroundings, Trajectories
from dicedist.benchmarks.step import STEPS_PER_EPOCH, bench_step, with_method
from dicedist.benchmarks.timing import compare, seconds
from dicedist.cluster.devices import pick_device
from dicedist.cluster.placement import DEFAULT_SIZE
from dicedist.cluster.world import World
from dicedist.config import Config, choices_of
from dicedist.config.schema import STRUCTURES
from dicedist.data import sources
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source

FORWARD = 1 / 3  # of the time of a step: what reading an input takes


def method_costs(config: Config, rounds: int = 5) -> list[dict[str, Any]]:
    """One row per method and structure, in one process; costs are multiples of ind in the same structure."""
    size = DEFAULT_SIZE if config.ensemble.size == "auto" else config.ensemble.size
    config = replace(config, ensemble=replace(config.ensemble, size=size))
    source, world = sources.load(config.data), World(0, 1, pick_device())
    rows = []
    for structure in STRUCTURES:
        candidates = configs(config, structure)
        trained = {each.method.name: each for each in candidates if not Method(each.method).asks_teacher}
        steps = {name: stepping(config_, world, source) for name, config_ in trained.items()}
        costs = compare(steps, "ind", rounds)
        rows += [{"structure": structure, "method": cost.pop(""), **cost} for cost in costs]
    return rows


def configs(config: Config, structure: str) -> list[Config]:
    """The config with each method that supports the structure."""
    found = []
    for name in choices_of("method"):
        with contextlib.suppress(ValueError):  # the method does not support it
            found.append(with_method(config, name, structure))
    return found


def stepping(config: Config, world: World, source: Source) -> Callable[[], object]:
    """One step of the method on its first batch, all members in this process."""
    members = list(range(config.num_members)) if config.data.per_member else [0]
    loader = Loader(source.train, config.data, source, config.batch_size, config.seed, world.device, members)
    batch: Batch = next(iter(loader.epoch(0)))
    step = bench_step(config, world, source.num_classes)
    last = config.epochs * STEPS_PER_EPOCH - STEPS_PER_EPOCH // 2
    followed = Trajectories(
        trajectories.build(config.trajectory),
        step.hosted,
        Clock(step.schedules.pace, STEPS_PER_EPOCH),
        config.epochs * STEPS_PER_EPOCH,
        Surroundings(len(source.train), config.optimizer.weight_decay),
        config.seed,
    )
    step.encoders |= followed.encoders

    def one() -> None:
        followed.before_step(last - 1)
        step(batch)
        followed.after_step(last)

    return one


def device_hours(config: Config, source: Source) -> float:
    """About how long one core (or GPU) computes for a training and its evaluation: from two steps of it."""
    one = stepping(config, World(0, 1, pick_device()), source)
    one()
    per_step, steps_per_epoch = seconds(one), num_batches(len(source.train), config.batch_size)
    validations = config.epochs // config.evaluate.every_epochs if len(source.val) else 0
    watched = min(config.evaluate.train_images, len(source.train))
    read = validations * (len(source.val) + watched) + (len(source.val) + len(source.test)) * config.samples
    return per_step * (config.epochs * steps_per_epoch + FORWARD * read / config.batch_size) / 3600
