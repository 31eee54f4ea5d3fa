"""The time that checkpoints, records and MLflow take from training. All parts are in one process."""

import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dicedist.benchmarks.building import build_step, random_batch, with_size
from dicedist.benchmarks.timing import seconds
from dicedist.cluster.world import World
from dicedist.config import Config
from dicedist.runs import checkpoint as saved
from dicedist.runs.run import Run
from dicedist.runs.saver import Saver
from dicedist.tracking.environment import Pace, node_figures
from dicedist.tracking.mirror import Mirror, destination_of
from dicedist.tracking.tracker import Tracker

CHECKPOINTS, BETWEEN = 9, 300.0  # BETWEEN in seconds
INTERVALS, VALUES = 200, 40  # VALUES per interval, as with four members and the discriminator w


def checkpoint(config: Config) -> list[dict[str, Any]]:
    """Return medians on the file system of run.dir: the copy to the host, and the time of the writing thread.

    The share counts the copy, for which training waits, and all processor time of the writer, as if no core were idle.
    """
    world = World(0, 1, torch.device("cpu"))
    step, _ = build_step(config, world)
    step(random_batch(config, world.device))  # the optimizers have no state before the first step
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.run.dir) as folder:
        run = Run(folder)
        run.records_file.touch()
        saver = Saver(run, config.checkpoint, 1000, lambda: step.hosted.parts, world.control, 0, print)
        turns = [turn(saver, number) for number in range(1, CHECKPOINTS + 1)]
        size = sum(file.stat().st_size for file in saved.path_of(run.checkpoints, CHECKPOINTS).iterdir())
    copied, processor, whole = (statistics.median(column) for column in zip(*turns, strict=True))
    share = 100 * (copied + processor) / BETWEEN
    return [{"MB": size / 1e6, "copy, s": copied, "writer, s": whole - copied, "its processor time, s": processor,
             "% of 5 minutes": share}]  # fmt: skip


def turn(saver: Saver, number: int) -> tuple[float, float, float]:
    """Return seconds of the copy, processor seconds of the writer, and seconds of both."""
    started = time.perf_counter()
    saver.start(number, {})
    copied, processor = time.perf_counter() - started, time.process_time()
    assert saver.finish()
    return copied, time.process_time() - processor, time.perf_counter() - started


def tracking(config: Config) -> list[dict[str, Any]]:
    """Return costs per interval of log.every_steps steps, in training and in the mirror, for sqlite or tracking.uri."""
    world = World(0, 1, torch.device("cpu"))
    config = with_size(config)
    step = partial(build_step(config, world)[0], random_batch(config, world.device))
    step()
    interval = config.log.every_steps * seconds(step)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.save_config(config)
        own = record(run, config, world)
        uri = config.tracking.uri or f"sqlite:///{folder}/mlflow.db"
        tracking = replace(config.tracking, uri=uri)
        mirror = Mirror(destination_of("mlflow", run, replace(config, tracking=tracking)))
        mirror.begin()
        sent = seconds(mirror.send_records) / INTERVALS
    return [
        {"": name, "seconds": cost, "% of the interval": 100 * cost / interval}
        for name, cost in (("records, in training", own), ("sending them, in the mirror", sent), ("steps", interval))
    ]


def record(run: Run, config: Config, world: World) -> float:
    """Return the seconds per interval that rank 0 spends on records."""
    tracker = Tracker(run, 10**9, 0, None, replace(config, tracking=replace(config.tracking, to="none")))
    tracker.progress.stream = Path("/dev/null").open("w")  # noqa: SIM115  closed with the process
    pace, values = Pace(config.batch_size, 0), {f"member_0/value_{n}": [1.0] for n in range(VALUES - 1)}
    started = time.perf_counter()
    for number in range(1, INTERVALS + 1):
        tracker.add(json.loads(json.dumps({**values, "member_0/loss": [1.0]})))
        tracker.summarize(number, 0.0, {})
        tracker.log_system(number, pace.figures(number) | node_figures(world))
    return (time.perf_counter() - started) / INTERVALS
