"""Compares alternatives on a machine that is never quiet: they take turns, and ratios are taken within a round.

On a CPU, when some alternatives are not ours, each runs in its own process: ours with the process settings of our
commands (`process.tune_malloc`), the others without, because these settings are part of what is compared.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from dicedist.cluster.process import tune_malloc


def compare(
    alternatives: Mapping[str, Callable[[], object]], reference: str, rounds: int, theirs: Collection[str] = ()
) -> list[dict[str, Any]]:
    """CPU seconds (wall seconds on a GPU) of each, and the median over rounds of its ratio to the reference.

    theirs: the names of the alternatives that are not ours.
    """
    if theirs and not torch.cuda.is_available():
        turns = in_processes(alternatives, rounds, theirs)
    else:
        turns = in_this_process(alternatives, rounds)
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
        far_end.close()  # so that the pipe breaks with the process
    turns = []
    for _ in range(rounds):
        turn = {}
        for name, end in ends.items():
            try:
                end.send(True)
                turn[name] = end.recv()
            except (EOFError, BrokenPipeError) as error:
                raise RuntimeError(f"{name} ended by itself, for the reason above") from error
        turns.append(turn)
    for end in ends.values():
        end.send(False)
    return turns


def serve(run: Callable[[], object], ours: bool, requests: Connection) -> None:
    if ours:
        tune_malloc()
    warm = False
    while requests.recv():
        if not warm:
            run()
            warm = True
        requests.send(seconds(run))


def in_this_process(alternatives: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    for run in alternatives.values():
        run()
    return [{name: seconds(run) for name, run in alternatives.items()} for _ in range(rounds)]


def seconds(run: Callable[[], object]) -> float:
    clock = time.process_time
    if torch.cuda.is_available():
        clock = time.perf_counter
        torch.cuda.synchronize()
    started = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started
