"""The time of a step by span."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dicedist.algorithm.build import Extent
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.spans import listening
from dicedist.algorithm.step import Step
from dicedist.benchmarks.building import STEPS_PER_EPOCH, build_step
from dicedist.cluster.assembly import placed
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import World, joined
from dicedist.config import Config
from dicedist.data import sources
from dicedist.data.pipeline import Loader
from dicedist.training.forecast import now_done

# The spans of a step and its exchange; `wait` waits for a message.
SPANS = ("encode", "gather", "redundancy", "scatter", "learn", "backward", "optimizer", "wait")
WARM_UP, STEPS = 2, 6


def step(config: Config) -> list[dict[str, Any]]:
    """Return seconds per span and images/s of every rank, in one process or under torchrun; only on rank 0."""
    placement = placed(config, Method(config.method), world_size())
    members = placement.members_on(this_rank())
    source = sources.load(config.data, labels_only=not members)
    with joined(config.distributed.timeout) as world:
        timed = build_step(config, world, Extent(source.num_classes, STEPS_PER_EPOCH))[0]
        loader = Loader.of(config, source, placement, world.rank, world.device)
        spent = phases(timed, loader, world)
        seconds, busy = unwatched(timed, loader, world)
        own: dict[str, float | None] = {**spent, "step that nobody watches": seconds, "processor time of it": busy}
        own["images/s of a member"] = config.batch_size / seconds if members else None
        records = world.control.report(own)
    return [{"seconds": name, **{f"rank {n}": record[name] for n, record in enumerate(records)}} for name in own]


def phases(timed: Step, loader: Loader, world: World) -> dict[str, float]:
    """Return the mean seconds per step of each span. A span waits for the device, which a real step does not.

    A span inside another span (the optimizer in backward, waiting in gather and scatter) is counted once.
    """
    spent, batches = dict.fromkeys(["data", *SPANS], 0.0), loader.epoch(0)
    with listening(partial(stopwatch, spent)):
        for n in range(WARM_UP + STEPS):
            if n == WARM_UP:
                world.control.barrier()
                spent.update(dict.fromkeys(spent, 0.0))
                started = time.perf_counter()
            with stopwatch(spent, "data"):
                batch = next(batches)
            timed(batch)
    whole = time.perf_counter() - started
    spent |= {"the rest": whole - sum(spent.values()), "whole step": whole}
    return {name: seconds / STEPS for name, seconds in spent.items()}


def unwatched(timed: Step, loader: Loader, world: World) -> tuple[float, float]:
    """Return the mean seconds per step without extra waits, so that w, members and messages overlap as in training.

    Return also the processor seconds of this rank, with all its threads.
    """
    batches = loader.epoch(1)
    for n in range(WARM_UP + STEPS):
        if n == WARM_UP:
            world.control.barrier()
            started, busy = now_done(world.device), time.process_time()
        timed(next(batches))
    return (now_done(world.device) - started) / STEPS, (time.process_time() - busy) / STEPS


@contextlib.contextmanager
def stopwatch(spent: dict[str, float], name: str) -> Iterator[None]:
    started, inside = time.perf_counter(), sum(spent.values())
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent[name] += time.perf_counter() - started - (sum(spent.values()) - inside)
