"""Comparing alternatives on a machine that is never quiet: they take turns, and ratios are taken within a round.

On a CPU each has a process of its own. What is ours runs with the process settings that our commands make
(`world.keep_memory`), what it is compared with runs without: they are part of what is compared.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from dicedist.world import keep_memory


def compare(
    alternatives: Mapping[str, Callable[[], object]], reference: str, rounds: int, theirs: Collection[str] = ()
) -> list[dict[str, Any]]:
    """CPU seconds (wall seconds on a GPU) of each, and the median over rounds of its ratio to the reference.

    theirs: the names of those that are not ours.
    """
    turns = (on_gpu if torch.cuda.is_available() else in_processes)(alternatives, rounds, theirs)
    return [
        {
            "": name,
            "seconds": statistics.median(turn[name] for turn in turns),
            f"times {reference}": statistics.median(turn[name] / turn[reference] for turn in turns),
        }
        for name in alternatives
    ]


def in_processes(
    alternatives: Mapping[str, Callable[[], object]], rounds: int, theirs: Collection[str]
) -> list[dict[str, float]]:
    context, ends = multiprocessing.get_context("fork"), {}
    for name, run in alternatives.items():
        ends[name], far_end = context.Pipe()
        context.Process(target=serve, args=(run, name not in theirs, far_end), daemon=True).start()
    turns = []
    for _ in range(rounds):
        turn = {}
        for name, end in ends.items():
            end.send(True)
            turn[name] = end.recv()
        turns.append(turn)
    for end in ends.values():
        end.send(False)
    return turns


def serve(run: Callable[[], object], ours: bool, requests: Connection) -> None:
    if ours:
        keep_memory()
    warm = False
    while requests.recv():
        if not warm:
            run()
            warm = True
        started = time.process_time()
        run()
        requests.send(time.process_time() - started)


def on_gpu(
    alternatives: Mapping[str, Callable[[], object]], rounds: int, theirs: Collection[str]
) -> list[dict[str, float]]:
    for run in alternatives.values():
        run()
    return [{name: seconds(run) for name, run in alternatives.items()} for _ in range(rounds)]


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started
