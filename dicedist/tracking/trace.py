"""profile=true: a few steps as a trace that chrome://tracing and ui.perfetto.dev show, one file for each rank."""

import contextlib
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dicedist.algorithm.spans import listening

WAIT, WARM_UP, TRACED = 3, 2, 5  # steps that are left out, that warm the profiler up, and that are kept


class Trace:
    def __init__(self, path: Path, device: torch.device):
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # without a GPU it prints an error, which is none
        self.path, self.steps, self.open = path, 0, contextlib.ExitStack()
        self.open.enter_context(listening(record_function))
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        steps = schedule(wait=WAIT, warmup=WARM_UP, active=TRACED, repeat=1)
        self.profiler = profile(activities=activities, schedule=steps, on_trace_ready=self.write)
        self.open.enter_context(self.profiler)

    def step(self) -> None:
        """Count a step that has ended."""
        if self.steps < WAIT + WARM_UP + TRACED:
            self.profiler.step()
            self.steps += 1
            if self.steps == WAIT + WARM_UP + TRACED:
                self.close()

    def write(self, traced: profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self.path))

    def close(self) -> None:
        """End the trace, perhaps before it is whole."""
        self.open.close()
