"""Where a run is sent to: a server, or an sqlite file; and who may decide that."""

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from dicedist.runs.files import read_json
from dicedist.runs.lock import locked
from dicedist.runs.run import Run

DEFAULT = "sqlite:///mlflow.db"  # in the working directory


def chosen_store(wanted: str | None) -> str:
    """What the user says, or the environment, or the default. Nothing in a run's folder decides whom we call."""
    return absolute(wanted or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT)


def refuse_another_store(run: Run, uri: str) -> None:
    """A run that was sent elsewhere before is not sent to a second store unless the user says so."""
    before, shown = read_or_nothing(run.mirror_file).get("uri"), without_password(uri)
    if before not in (None, shown):
        raise ValueError(
            f"the records of {run} were sent to {before}, and this would send them to {shown}: "
            f"`python -m dicedist.mirror {run} tracking.uri={before}` goes on there, tracking.uri={shown} makes a copy"
        )


def absolute(uri: str) -> str:
    """An sqlite file by its whole path, so that it is the same one from any working directory."""
    scheme, _, path = uri.partition(":///")
    return f"sqlite:///{Path(path).expanduser().absolute()}" if scheme == "sqlite" else uri


def folder_of(uri: str) -> Path | None:
    """The folder of an sqlite file; None if a server holds the database."""
    scheme, _, path = uri.partition(":///")
    return Path(path).resolve().parent if scheme == "sqlite" else None


def files_of(uri: str, experiment: str) -> str | None:
    """Artifacts go beside an sqlite file; MLflow would use the working directory. None: the server decides."""
    folder = folder_of(uri)
    return (folder / "mlruns" / experiment).as_uri() if folder else None


def alone(uri: str) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time create the tables of an sqlite file: MLflow's own lock is not enough."""
    folder = folder_of(uri)
    return locked(folder / ".mlflow.lock") if folder else contextlib.nullcontext()


def without_password(uri: str) -> str:
    """For messages and files."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def read_or_nothing(path: Path) -> dict[str, Any]:
    """What a JSON file says; of a missing or damaged one nothing is believed."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
