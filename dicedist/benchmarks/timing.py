"""Compare alternatives on a busy machine: they take turns, and ratios are taken within a round.

On a CPU, if some alternatives are not ours, each runs in its own process. Ours use the process settings of our commands
(`process.tune_malloc`), the others do not, because the comparison includes these settings.
"""

import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from dicedist.benchmarks.processes import ask, start
from dicedist.cluster.process import tune_malloc

Alternatives = Mapping[str, Callable[[], object]]


def compare(
    alternatives: Alternatives, reference: str, rounds: int, theirs: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return CPU seconds (wall seconds on a GPU) of each, and the median over rounds of its ratio to the reference.

    theirs: the names of the alternatives that are not ours. The first round is a warm-up.
    """
    if theirs and not torch.cuda.is_available():
        turns = in_processes(alternatives, rounds, theirs)
    else:
        _, *turns = [{name: seconds(run) for name, run in alternatives.items()} for _ in range(1 + rounds)]
    return [
        {
            "": name,
            "seconds": median(turn[name] for turn in turns),
            f"times {reference}": median(turn[name] / turn[reference] for turn in turns),
        }
        for name in alternatives
    ]


def in_processes(alternatives: Alternatives, rounds: int, theirs: Collection[str]) -> list[dict[str, float]]:
    ends = {name: start("fork", serve, run, name not in theirs, daemon=True)[1] for name, run in alternatives.items()}
    _, *turns = [{name: ask(end, True, name) for name, end in ends.items()} for _ in range(1 + rounds)]
    for end in ends.values():
        end.send(False)
    return turns


def serve(run: Callable[[], object], ours: bool, requests: Connection) -> None:
    if ours:
        tune_malloc()
    while requests.recv():
        requests.send(seconds(run))


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
