"""Start mirrors, the processes that send a run to its trackers. This module imports no tracker."""

import os
import subprocess
import sys

from dicedist.cluster.channel import CHANNEL
from dicedist.cluster.process import LAUNCHER, SECRET
from dicedist.config.schema import TRACKERS, Config
from dicedist.runs.run import Run

# Environment variables of ranks, which a mirror must not inherit.
RANKS_OWN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", LAUNCHER, CHANNEL, SECRET)


def start_mirror(run: Run, config: Config, tracker: str) -> "subprocess.Popen[str]":
    """Start a mirror. It sends records until its pipe closes, also by a crash, and then everything that is left."""
    trusted = f"network.trusted={str(config.network.trusted).lower()}"
    return subprocess.Popen(
        [*command(run, tracker, config.tracking.uri), trusted, "--follow"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # signals to the ranks do not reach the mirror
        env=environment(),
    )


def refresh(run: Run) -> None:
    """Send the results of a run that was evaluated again to the trackers that have the run."""
    for tracker in TRACKERS:
        if run.mirror_file(tracker).exists():
            subprocess.run(command(run, tracker, None), env=environment(), check=False)  # the mirror prints its errors


def command_for(run: Run, tracker: str) -> str:
    """Return the command that sends the rest of a run."""
    return f"python -m dicedist.mirror {run}" + (f" tracking={tracker}" if tracker != "mlflow" else "")


def command(run: Run, tracker: str, uri: str | None) -> list[str]:
    words = [f"tracking={tracker}", *([f"tracking.uri={uri}"] if uri and tracker == "mlflow" else [])]
    return [sys.executable, "-m", "dicedist.mirror", str(run), *words]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in RANKS_OWN}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}
