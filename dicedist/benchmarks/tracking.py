"""What records cost: work in the training process, and the processor time of the mirror beside it."""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dicedist.algorithm.batch import Batch
from dicedist.benchmarks.step import bench_step
from dicedist.benchmarks.timing import seconds
from dicedist.cluster.world import World
from dicedist.config import Config
from dicedist.runs.run import Run
from dicedist.tracking.environment import Pace, node_figures
from dicedist.tracking.mlflow.mirror import Mirror
from dicedist.tracking.tracker import Tracker

INTERVALS = 200
VALUES = 40  # per interval, as of four members and the discriminator w
CLASSES = 100


def tracking(config: Config) -> list[dict[str, Any]]:
    """Costs per interval of log.every_steps steps, with all parts in one process; sent to sqlite or tracking.uri."""
    world = World(0, 1, torch.device("cpu"))
    step = bench_step(config, world, CLASSES)
    images, labels_B = torch.randn(config.batch_size, 3, 32, 32), torch.randint(CLASSES, (config.batch_size,))
    batch = Batch(0, 0, len(labels_B), slice(None), labels_B, labels_B, 0, [images])
    step(batch)
    interval = config.log.every_steps * seconds(lambda: step(batch))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.save_config(config)
        own = record(run, config, world)
        uri = config.tracking.uri or f"sqlite:///{folder}/mlflow.db"
        mirror = Mirror(run, config, uri)
        mirror.begin()
        sent = seconds(mirror.send_records) / INTERVALS
    return [
        {"": name, "seconds": cost, "% of the interval": 100 * cost / interval}
        for name, cost in (("records, in training", own), ("sending them, in the mirror", sent), ("steps", interval))
    ]


def record(run: Run, config: Config, world: World) -> float:
    """Seconds per interval that the reporting rank spends on records."""
    tracker = Tracker(run, 10**9, 0, None, replace(config, tracking=replace(config.tracking, to="none")))
    tracker.progress.stream = Path("/dev/null").open("w")  # noqa: SIM115  closed with the process
    pace, values = Pace(config.batch_size, 0), {f"member_0/value_{n}": [1.0] for n in range(VALUES - 1)}
    started = time.perf_counter()
    for number in range(1, INTERVALS + 1):
        tracker.add(json.loads(json.dumps({**values, "member_0/loss": [1.0]})))
        tracker.summarise(number, 0.0, {})
        tracker.log_system(number, pace.figures(number) | node_figures(world))
    return (time.perf_counter() - started) / INTERVALS
