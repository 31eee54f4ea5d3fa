"""Trainings as forks of a process that has already imported torch.

A fork starts seconds sooner than `python -m dicedist.train`, and also has its own memory, signals and exit code.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence

IMPORTED = ["dicedist.trainer", "torch._dynamo"]  # these imports start no threads and use no GPU


class Fork:
    """A training process with the interface of Popen. log: file to which its output is appended."""

    def __init__(self, overrides: Sequence[str], log: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.process = context.Process(target=train, args=(list(overrides), log))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


def train(overrides: list[str], log: str) -> None:
    """Run the training inside the fork."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["dicedist.train", *overrides]
    runpy.run_module("dicedist.train", run_name="__main__", alter_sys=True)
