"""The environment of a run, recorded at its start, and the load of its nodes during training."""

import contextlib
import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from dicedist.cluster.devices import GIB
from dicedist.cluster.world import World
from dicedist.config import names
from dicedist.runs.files import replace_text
from dicedist.runs.run import Run


def note(run: Run, placement: list[str], data_digest: str) -> None:
    """Write environment.json, for reproduction: versions, the commit, the placement, a digest of the images."""
    about = {
        "dicedist": version("dicedist"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "git_commit": git_commit(),
        "placement": placement,
        "data_digest": data_digest,
    }
    replace_text(run.environment_file, json.dumps(about, indent=1))


def git_commit() -> str | None:
    """Return the git commit of this package, with -changed for uncommitted changes; None without a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        git = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def node_figures(world: World) -> dict[str, float]:
    """Return the load of this rank's GPU and, on the first rank of a node, of the node, by MLflow's metric names."""
    figures = {}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        memory = psutil.virtual_memory()
        figures["cpu_utilization_percentage"] = psutil.cpu_percent()  # since the last call
        figures["system_memory_usage_gib"] = round(memory.used / GIB, 3)
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        figures[f"gpu_{world.device.index}_memory_usage_gib"] = round((total - free) / GIB, 3)
        with contextlib.suppress(Exception):  # some containers hide NVML
            figures[f"gpu_{world.device.index}_utilization_percentage"] = torch.cuda.utilization(world.device)
    return {f"system/{world.host}/{name}": value for name, value in figures.items()}


class Pace:
    """Images per second of each member, and seconds per step, between two calls."""

    def __init__(self, batch_size: int, step: int):
        self.batch_size, self.step, self.time = batch_size, step, time.monotonic()

    def figures(self, step: int) -> dict[str, float]:
        now = time.monotonic()
        seconds, steps = now - self.time, step - self.step
        self.step, self.time = step, now
        if steps <= 0 or seconds <= 0:
            return {}
        return {
            names.IMAGES_PER_SECOND: steps * self.batch_size / seconds,
            names.SECONDS_PER_STEP: seconds / steps,
        }
