"""`dicedist train --nproc N key=value ...`: the processes of a training, under the launcher that restarts them.

N is a number, or auto: a process a GPU, as far as there are members and a discriminator to host; without a GPU, one.
With auto the ensemble does not depend on the machine: its default size is that of a single process. $DICEDIST_NPROC
stands for the option.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from dicedist import resume, train
from dicedist.config import compose_config
from dicedist.objectives import Method
from dicedist.placement import DEFAULT_SIZE, ranks_of

NPROC = "DICEDIST_NPROC"


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("dicedist train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", default=os.environ.get(NPROC) or "1")
    options, rest = parser.parse_known_args(arguments)
    is_rank = "RANK" in os.environ  # of torchrun's: the processes are there
    if is_rank or "--help" in rest or "-h" in rest:
        train.run(rest)
        return
    ranks, overrides = spread(options.nproc, rest)
    if ranks == 1:
        train.run(overrides)
        return
    launch = ["-m", "dicedist.launch", f"--nproc_per_node={ranks}", "-m", "dicedist.train"]
    # In place of this process, so that signals reach the launcher and its exit code is this command's.
    os.execv(sys.executable, [sys.executable, *launch, *overrides])


def spread(nproc: str, overrides: Sequence[str]) -> tuple[int, list[str]]:
    """How many processes, and what each is told."""
    if nproc != "auto":
        if not nproc.isdecimal() or int(nproc) == 0:
            raise ValueError(f"--nproc {nproc} (or {NPROC}): write a number above 0, or auto for a process a GPU")
        return int(nproc), [*overrides]
    config = compose_config(overrides)
    size = resume.ensemble_size(config)
    fixed = [] if isinstance(size, int) else [f"ensemble.size={DEFAULT_SIZE}"]
    needs_w = Method(config.method).redundancy is not None
    parts = ranks_of(DEFAULT_SIZE if fixed else int(size), needs_w, config.ensemble.replicas)
    return max(1, min(torch.cuda.device_count(), parts)), [*overrides, *fixed]
