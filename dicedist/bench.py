"""Measure this machine.

    python -m dicedist.bench data              images/s of DALI, torch and a torchvision DataLoader
    python -m dicedist.bench files             the same for 20,000 JPEGs, next to torchvision's ImageFolder; memory
    python -m dicedist.bench step              where the time of a step goes; also under torchrun
    python -m dicedist.bench launches          operations that a step gives to the device, by span
    python -m dicedist.bench cost              cost of DICE relative to independent training, in one process
    python -m dicedist.bench batched           members of one device in turn, as one grouped network, on streams (GPU)
    python -m dicedist.bench discriminator     w against the literal network of the paper
    python -m dicedist.bench memory            w with 1000 classes and 2048 features, without and with a copied memory
    python -m dicedist.bench overlap           overlap of w's learning with the members' work (devices emulated)
    python -m dicedist.bench scaling           one device per part, 4 to 32 members (devices emulated)
    python -m dicedist.bench scaling --simulate      a step against members, nodes and links (computed)
    python -m dicedist.bench methods           the step of each method relative to independent training
    python -m dicedist.bench recipes           ResNet-18 at 224 pixels, next to a bare loop (on a CPU batch_size=16)
    python -m dicedist.bench heads             heads on a frozen backbone, a few and 16, next to bare loops
    python -m dicedist.bench checkpoint        time that checkpoints take from training
    python -m dicedist.bench tracking          time that records and MLflow take from training
    python -m dicedist.bench evaluate          every measure for 10 members x 10,000 inputs x 100 classes
    python -m dicedist.bench corruptions       images/s of every corruption, at each severity
    python -m dicedist.bench data data=cifar10 batch_size=256     any key of the training config
    python -m dicedist.bench files data.train_limit=500     for fewer JPEGs, or for yours: data=files data.root=FOLDER

Prints a table and writes bench-NAME.json.
"""

import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dicedist.benchmarks import simulation
from dicedist.cluster.devices import refuse_compile
from dicedist.cluster.process import command, this_rank, tune_malloc
from dicedist.config import compose_config
from dicedist.console.tables import table

Rows = list[dict[str, Any]]
BENCHMARKS = {  # name -> module and function of (config) -> rows
    "batched": "batched.batched",
    "checkpoint": "upkeep.checkpoint",
    "corruptions": "corruptions.corruptions",
    "cost": "costs.cost",
    "data": "data.data",
    "discriminator": "discriminator.discriminator",
    "evaluate": "evaluate.evaluate",
    "files": "files.files",
    "launches": "launches.launches",
    "heads": "heads.heads",
    "memory": "discriminator.memory",
    "methods": "costs.method_costs",
    "overlap": "overlap.overlap",
    "recipes": "costs.recipes",
    "scaling": "overlap.scaling",
    "step": "step.step",
    "tracking": "upkeep.tracking",
}
# Comparisons with other libraries: each side makes its own process settings.
COMPARISONS = ("cost", "discriminator", "heads", "recipes")


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    name, *overrides = arguments
    if "--simulate" in overrides and name != "scaling":
        raise ValueError(f"{name} --simulate: only scaling can be simulated; write scaling --simulate")
    if name not in BENCHMARKS:
        raise ValueError(f"{name}: there is no such benchmark; write one of {', '.join(BENCHMARKS)}")
    if name in COMPARISONS:
        torch.set_num_threads(1)  # a forked process would wait forever for its parent's threads
    else:
        tune_malloc()
    rows = simulated(overrides) if "--simulate" in overrides else measured(name, overrides)
    if this_rank() > 0:
        return
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(describe_machine())
    path = Path("bench-simulation.json" if "--simulate" in overrides else f"bench-{name}.json")
    path.write_text(json.dumps({"machine": describe_machine(), "overrides": overrides, "rows": rows}, indent=1))
    print(f"-> {path}")


def measured(name: str, overrides: Sequence[str]) -> Rows:
    config = compose_config(overrides)
    refuse_compile(config.compile)
    module, _, function = BENCHMARKS[name].partition(".")
    return getattr(importlib.import_module(f"dicedist.benchmarks.{module}"), function)(config)


def simulated(words: Sequence[str]) -> Rows:
    """Compute `scaling` from the times of a device, given as simulate.NAME=VALUE."""
    times = simulation.assumed([word for word in words if word.startswith("simulate.")])
    return simulation.simulate(
        compose_config([word for word in words if not word.startswith(("--", "simulate."))]), times
    )


def describe_machine() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} thread(s) a rank"
    return f"{platform.machine()}, {cores} cores, {threads}, {devices}, torch {torch.__version__}, {sys.platform}"


if __name__ == "__main__":
    command(run)
