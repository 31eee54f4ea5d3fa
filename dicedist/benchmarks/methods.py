"""What each method costs compared with independent training: its step on the same network, members and images."""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

from dicedist.algorithm.objectives import Method
from dicedist.benchmarks.step import bench_step, with_method
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.cluster.placement import DEFAULT_SIZE
from dicedist.cluster.world import World
from dicedist.config import Config, choices_of
from dicedist.config.schema import STRUCTURES
from dicedist.data import sources
from dicedist.data.pipeline import Loader


def method_costs(config: Config, rounds: int = 5) -> list[dict[str, Any]]:
    """One row per method and structure, in one process; costs are multiples of ind in the same structure."""
    size = DEFAULT_SIZE if config.ensemble.size == "auto" else config.ensemble.size
    config = replace(config, ensemble=replace(config.ensemble, size=size))
    source, world = sources.load(config.data), World(0, 1, pick_device())
    loader = Loader(source.train, config.data, source, config.batch_size, config.seed, world.device, members=[0])
    batch = next(iter(loader.epoch(0)))
    rows = []
    for structure in STRUCTURES:
        candidates = configs(config, structure)
        trained = {each.method.name: each for each in candidates if not Method(each.method).asks_teacher}
        steps = {name: bench_step(config_, world, source.num_classes) for name, config_ in trained.items()}
        costs = compare({name: partial(step, batch) for name, step in steps.items()}, "ind", rounds)
        rows += [{"structure": structure, "method": cost.pop(""), **cost} for cost in costs]
    return rows


def configs(config: Config, structure: str) -> list[Config]:
    """The config with each method that supports the structure."""
    found = []
    for name in choices_of("method"):
        with contextlib.suppress(ValueError):  # the method does not support it
            found.append(with_method(config, name, structure))
    return found
