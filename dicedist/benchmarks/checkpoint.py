"""What a checkpoint costs training: the copy to the host, and the processor time of the thread that writes it."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dicedist.algorithm.batch import Batch
from dicedist.benchmarks.step import bench_step
from dicedist.cluster.world import World
from dicedist.config import Config
from dicedist.runs import checkpoint as saved
from dicedist.runs.run import Run
from dicedist.runs.saver import Saver

ROUNDS = 9
CLASSES, INTERVAL = 100, 300.0  # INTERVAL in seconds


def checkpoint(config: Config) -> list[dict[str, Any]]:
    """Medians, with all parts in one process, on the file system of run.dir.

    The share counts the copy, for which training waits, and all processor time of the writer, as if no core were free.
    """
    world = World(0, 1, torch.device("cpu"))
    step = bench_step(config, world, CLASSES)
    images, labels_B = torch.randn(config.batch_size, 3, 32, 32), torch.randint(CLASSES, (config.batch_size,))
    # The optimisers have no state before the first step.
    step(Batch(0, 0, len(labels_B), slice(None), labels_B, labels_B, 0, [images]))
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.run.dir) as folder:
        run = Run(folder)
        run.records_file.touch()
        saver = Saver(run, config.checkpoint, 1000, lambda: step.hosted.parts, world.control, 0, print)
        turns = [turn(saver, number) for number in range(1, ROUNDS + 1)]
        size = sum(file.stat().st_size for file in saved.path_of(run.checkpoints, ROUNDS).iterdir())
    copied, processor, whole = (statistics.median(column) for column in zip(*turns, strict=True))
    share = 100 * (copied + processor) / INTERVAL
    return [{"MB": size / 1e6, "copy, s": copied, "writer, s": whole - copied, "its processor time, s": processor,
             "% of 5 minutes": share}]  # fmt: skip


def turn(saver: Saver, number: int) -> tuple[float, float, float]:
    """Seconds of the copy, processor seconds of the writing that follows, seconds of both."""
    started = time.perf_counter()
    saver.start(number, {})
    copied, processor = time.perf_counter() - started, time.process_time()
    assert saver.finish()
    return copied, time.process_time() - processor, time.perf_counter() - started
