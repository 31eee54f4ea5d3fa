"""Start a command as several processes on this machine: `--nproc N`, or `--nproc auto` for one process per GPU."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence


def spread(command: str, arguments: Sequence[str], most: Callable[[], int] | None = None) -> list[str]:
    """Return the arguments without --nproc. With more than one process, the launcher replaces this process.

    most: returns the number of processes that have work, for `auto`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", default="1")
    options, rest = parser.parse_known_args(arguments)
    processes = 1 if "RANK" in os.environ else number_of(options.nproc, most)
    if processes > 1:
        # A command that has printed half of its answers must not restart, so a fault ends it.
        launch = ["-m", "dicedist.launch", f"--nproc_per_node={processes}", "--max-restarts=0", "-m"]
        os.execv(sys.executable, [sys.executable, *launch, f"dicedist.{command}", *rest])
    return rest


def number_of(nproc: str, most: Callable[[], int] | None = None, option: str = "--nproc") -> int:
    """Return the number of processes. option: the name of the option, for messages. most: see spread."""
    if nproc != "auto":
        if not nproc.isdecimal() or int(nproc) == 0:
            raise ValueError(f"{option} {nproc}: write a number above 0, or auto for a process on each GPU")
        return int(nproc)
    import torch  # not above: help works without torch

    devices = torch.cuda.device_count()
    return max(1, devices if most is None else min(devices, most()))
