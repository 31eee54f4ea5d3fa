"""Starts the mirror, the process that sends a run to MLflow; MLflow itself is never imported here."""

import os
import subprocess
import sys

from dicedist.cluster.process import LAUNCHER, SECRET
from dicedist.config.schema import Config
from dicedist.runs.run import Run

# Variables that make a process a rank, and what only ranks know.
RANKS_OWN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", LAUNCHER, SECRET)


def start_mirror(run: Run, config: Config) -> "subprocess.Popen[str]":
    """Start the process. It sends records until the pipe to it is closed, also by a crash, then whatever is left."""
    return subprocess.Popen(
        [*command(run, config.tracking.uri), f"network.trusted={str(config.network.trusted).lower()}", "--follow"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # signals to the ranks are not for it
        env=environment(),
    )


def refresh(run: Run) -> None:
    """Send the results of a run that was evaluated again, if MLflow has the run."""
    if run.mirror_file.exists():
        subprocess.run(command(run, None), env=environment(), check=False)  # it says itself what went wrong


def command(run: Run, uri: str | None) -> list[str]:
    return [sys.executable, "-m", "dicedist.mirror", str(run), *([f"tracking.uri={uri}"] if uri else [])]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in RANKS_OWN}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}
