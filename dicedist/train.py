"""Train an ensemble, or resume its training.

Examples:
    torchrun --nproc_per_node=5 -m dicedist.train                       the paper's main job, on CIFAR-100
    torchrun --nproc_per_node=5 -m dicedist.train data=shapes           no files needed
    python -m dicedist.train ensemble.size=3 method=ceb data=cifar10    everything in one process
    python -m dicedist.train --nproc 5                                  starts the processes itself, and again on faults

--nproc is a number, or auto: one process for each GPU, at most one per member and discriminator, and a single one
without a GPU. With auto the default size of the ensemble is the size for a single process, on any machine.
$DICEDIST_NPROC sets the same option. --verbose also prints ranks, memory, traffic and every table of results.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dicedist.cluster.process import command
from dicedist.cluster.spread import number_of

if TYPE_CHECKING:
    from dicedist.config import Config

NPROC = "DICEDIST_NPROC"


def run(arguments: Sequence[str]) -> None:
    # Not above: `command` installs its signal handlers first.
    from dicedist.config import Config, compose_config, show_help
    from dicedist.config.extras import require_tracker

    parser = argparse.ArgumentParser("dicedist train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", default=os.environ.get(NPROC) or "1")
    parser.add_argument("--verbose", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    overrides += ["log.verbose=true"] if options.verbose else []
    if "--help" in overrides or "-h" in overrides:
        show_help(__doc__, "train", Config, None if "all" in overrides else "dicedist train --help all")
        return
    if unknown := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{unknown[0]}: there is no such option; write --nproc N, --verbose, or key=value")
    config = compose_config(overrides)
    for tracker in config.tracking.trackers:
        require_tracker(tracker, f"tracking={tracker}", config.tracking.uri, config.tracking.model)
    is_rank = "RANK" in os.environ  # torchrun has started the processes
    processes, added = (1, []) if is_rank else planned_processes(options.nproc, config)
    if processes > 1:
        launch = ["-m", "dicedist.launch", f"--nproc_per_node={processes}", "-m", "dicedist.train"]
        # Replace this process, so that signals reach the launcher and its exit code is this command's.
        os.execv(sys.executable, [sys.executable, *launch, *overrides, *added])
    from dicedist.trainer import train  # not above: importing torch takes seconds

    train(compose_config([*overrides, *added]) if added else config)


def planned_processes(nproc: str, config: "Config") -> tuple[int, list[str]]:
    """Return the number of processes, and the overrides of each in addition to the user's."""
    if nproc != "auto":
        return number_of(nproc, option=f"--nproc (or ${NPROC})"), []
    from dicedist.algorithm.objectives import Method
    from dicedist.cluster.placement import DEFAULT_SIZE, ranks_of
    from dicedist.runs.resume import ensemble_size

    size = ensemble_size(config)
    fixed = [] if isinstance(size, int) else [f"ensemble.size={DEFAULT_SIZE}"]
    needs_w = Method.to_train(config.method).counterpart is not None
    members = DEFAULT_SIZE if fixed else int(size)
    parts = ranks_of(members, needs_w, config.ensemble.replicas, config.redundancy.ranks)
    return number_of(nproc, lambda: parts), fixed


if __name__ == "__main__":
    command(run)
