"""Comparing alternatives on a machine that is never quiet: they take turns, and ratios are taken within a round."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def compare(alternatives: Mapping[str, Callable[[], Any]], reference: str, rounds: int) -> list[dict[str, Any]]:
    """CPU seconds (wall seconds on a GPU) of each, and the median over rounds of its ratio to the reference."""
    for run in alternatives.values():
        run()
    turns = [{name: seconds(run) for name, run in alternatives.items()} for _ in range(rounds)]
    return [
        {
            "": name,
            "seconds": statistics.median(turn[name] for turn in turns),
            f"times {reference}": statistics.median(turn[name] / turn[reference] for turn in turns),
        }
        for name in alternatives
    ]


def seconds(run: Callable[[], Any]) -> float:
    clock = time.process_time
    if torch.cuda.is_available():
        clock = time.perf_counter
        torch.cuda.synchronize()
    started = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started
