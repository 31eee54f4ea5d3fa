"""Which run a folder holds, and whether this command may continue it. A run is never overwritten."""

import os
import uuid
from collections.abc import Callable

from dicedist.config import Config, Scope, changed_keys, flatten
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.run import Run

FIXED = {Scope.RESULT, Scope.IDENTITY}  # a change in these scopes makes it another run


def ensemble_size(config: Config) -> int | str:
    """A continued run keeps its number of members on any number of ranks, unless the command sets ensemble.size."""
    run = Run.of(config)
    continues = config.ensemble.size == "auto" and config.resume != "never" and os.path.exists(run.config_file)
    return run.config().ensemble.size if continues else config.ensemble.size


def find(run: Run, config: Config, data_digest: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """Called on rank 0, which holds the lock. Returns the checkpoint to continue from, or None to start a new run."""
    found = run.newest_checkpoint(lambda text: warn(f"{text}; the checkpoint before it is tried"))
    saved = checkpoint.saved(run.checkpoints)
    begun = bool(saved) or has_records(run)
    if config.resume == "never" and begun and not restarted(run):
        raise ValueError(
            f"{run} holds a run already: choose another run.name, or leave out resume=never to continue it"
        )
    if found is None and (saved or config.resume == "must"):
        reason = f"{run} has no intact checkpoint{checkpoint.what_is_wrong(run.checkpoints)}"
        raise ValueError(
            f"resume=must, but {reason}" if config.resume == "must" else f"{reason}; choose another run.name"
        )
    if begun:
        refuse_another(run, config)
    if found is not None and found.about["data"] != data_digest:
        raise ValueError(f"the images are not those that {run} was trained on: choose another run.name")
    checkpoint.discard(run.checkpoints)
    run.save_config(config)
    run.launch_file.write_text(this_launch())
    return found


def this_launch() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def leave_mark(run: Run) -> str:
    """Called on rank 0; other ranks look for the mark with `sees`."""
    mark = uuid.uuid4().hex
    run.mark_file.write_text(mark)
    return mark


def sees(run: Run, mark: str) -> bool:
    """Whether this rank sees the folder in which rank 0 left its mark."""
    try:
        return run.mark_file.read_text() == mark
    except OSError:
        return False


def restarted(run: Run) -> bool:
    path = run.launch_file
    return path.exists() and path.read_text() == this_launch() != ""


def has_records(run: Run) -> bool:
    return run.records_file.exists() and run.records_file.stat().st_size > 0


def refuse_another(run: Run, config: Config) -> None:
    saved = run.config()
    if changed := changed_keys(flatten(saved), flatten(config), FIXED):
        raise ValueError(f"{run} was trained with another config ({'; '.join(changed)}): choose another run.name")
    if saved.epochs != config.epochs and saved.schedules.scale:
        raise ValueError(
            f"epochs: {saved.epochs} -> {config.epochs} would move every schedule of {run}, which has begun: "
            "choose another run.name (a run with schedules.scale=false may change its epochs, any run its max_steps)"
        )
