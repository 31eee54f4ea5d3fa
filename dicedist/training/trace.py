"""Trace a few steps (profile=true): one file per rank for chrome://tracing or ui.perfetto.dev."""

import contextlib
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dicedist.algorithm.spans import listening
from dicedist.algorithm.step import Outcome
from dicedist.training.listeners import Listener

WAIT, WARM_UP, TRACED = 3, 2, 5  # steps: skipped, warm-up of the profiler, traced


class Trace(Listener):
    def __init__(self, path: Path, device: torch.device):
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # without a GPU it prints a harmless error
        self.path, self.steps, self.open = path, 0, contextlib.ExitStack()
        self.open.enter_context(listening(record_function))
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        steps = schedule(wait=WAIT, warmup=WARM_UP, active=TRACED, repeat=1)
        self.profiler = profile(activities=activities, schedule=steps, on_trace_ready=self.write)
        self.open.enter_context(self.profiler)

    def after_step(self, done: int, outcome: Outcome) -> None:
        if self.steps < WAIT + WARM_UP + TRACED:
            self.profiler.step()
            self.steps += 1
            if self.steps == WAIT + WARM_UP + TRACED:
                self.open.close()

    def write(self, traced: profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self.path))

    def finish(self, stopped: bool) -> None:
        """End the trace, also before it is complete."""
        self.open.close()
