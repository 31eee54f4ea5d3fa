"""Which run a folder holds, and whether this command may continue it. A run is never overwritten."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dicedist import checkpoint
from dicedist.checkpoint import Checkpoint
from dicedist.config import Config, differences, load_config, save_config
from dicedist.tracking import RECORDS

CONFIG, RESULT = "config.yaml", "evaluation.json"
MARK = ".mark"
LAUNCH = ".launch"  # which launch began the run: its restarts continue it whatever `resume` says


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def ensemble_size(config: Config) -> int | str:
    """A run continues with its members on any number of ranks, unless the command says how many it wants."""
    saved = run_folder(config) / CONFIG
    continues = config.ensemble.size == "auto" and config.resume != "never" and os.path.exists(saved)
    return load_config(saved).ensemble.size if continues else config.ensemble.size


def find(directory: Path, config: Config, data_digest: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """On rank 0, which holds the lock: the checkpoint to continue from, None to start anew."""
    found = checkpoint.newest(directory, lambda text: warn(f"{text}; the checkpoint before it is tried"))
    begun = bool(checkpoint.saved(directory)) or has_records(directory)
    if config.resume == "never" and begun and not restarted(directory):
        raise ValueError(
            f"{directory} holds a run already: choose another run.name, or leave out resume=never to continue it"
        )
    if config.resume == "must" and found is None:
        raise ValueError(f"resume=must, but {directory} has no intact checkpoint{checkpoint.what_is_wrong(directory)}")
    if found is None and checkpoint.saved(directory):
        raise ValueError(
            f"{directory} has no intact checkpoint{checkpoint.what_is_wrong(directory)}; choose another run.name"
        )
    if begun:
        refuse_another(directory, config)
    if found is not None and found.about["data"] != data_digest:
        raise ValueError(f"the images are not those that {directory} was trained on: choose another run.name")
    checkpoint.discard(directory)
    save_config(config, directory / CONFIG)
    (directory / LAUNCH).write_text(this_launch())
    return found


def this_launch() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def leave_mark(directory: Path) -> str:
    """On rank 0, for `sees`."""
    mark = uuid.uuid4().hex
    (directory / MARK).write_text(mark)
    return mark


def sees(directory: Path, mark: str) -> bool:
    """Whether this rank's folder is the one that rank 0 left its mark in."""
    try:
        return (directory / MARK).read_text() == mark
    except OSError:
        return False


def restarted(directory: Path) -> bool:
    path = directory / LAUNCH
    return path.exists() and path.read_text() == this_launch() != ""


def has_records(directory: Path) -> bool:
    path = directory / RECORDS
    return path.exists() and path.stat().st_size > 0


def refuse_another(directory: Path, config: Config) -> None:
    saved = load_config(directory / CONFIG)
    changed = differences(saved, config)
    if changed:
        raise ValueError(f"{directory} was trained with another config ({'; '.join(changed)}): choose another run.name")
    if saved.epochs != config.epochs and saved.schedules.scale:
        raise ValueError(
            f"epochs: {saved.epochs} -> {config.epochs} would move every schedule of {directory}, which has begun: "
            "choose another run.name (a run with schedules.scale=false may change its epochs, any run its max_steps)"
        )


def result_of(directory: Path) -> dict[str, Any] | None:
    """The evaluation of a finished run; None if it was not written, or not to its end."""
    try:
        return json.loads((directory / RESULT).read_text())
    except (OSError, ValueError):
        return None
