"""The MLflow store of a run: a server, or an sqlite file."""

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from dicedist.runs.lock import locked
from dicedist.runs.run import Run
from dicedist.tracking.state import read_or_nothing

LONGEST_NAME = 100  # characters of a folder
DEFAULT = "sqlite:///mlflow.db"  # in the working directory


def chosen_store(wanted: str | None) -> str:
    """Return the store from the command line, the environment or the default, never from a run's folder."""
    return absolute(wanted or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT)


def refuse_another_store(run: Run, uri: str) -> None:
    """Raise ValueError if the run was sent to another store before, unless the user names this one."""
    before, shown = read_or_nothing(run.mirror_file("mlflow")).get("uri"), without_password(uri)
    if before not in (None, shown):
        raise ValueError(
            f"the records of {run} were sent to {before}, and now would go to {shown}: "
            f"`python -m dicedist.mirror {run} tracking.uri={before}` goes on there, tracking.uri={shown} makes a copy"
        )


def absolute(uri: str) -> str:
    """Make the path of an sqlite file absolute, so that the working directory does not matter."""
    scheme, _, path = uri.partition(":///")
    return f"sqlite:///{Path(path).expanduser().absolute()}" if scheme == "sqlite" else uri


def folder_of(uri: str) -> Path | None:
    """Return the folder of an sqlite file; None if a server holds the database."""
    scheme, _, path = uri.partition(":///")
    return Path(path).resolve().parent if scheme == "sqlite" else None


def files_of(uri: str, experiment: str) -> str | None:
    """Return the artifacts' folder next to an sqlite file, not in the working directory; None: the server decides."""
    folder, name = folder_of(uri), re.sub(r"[^\w -]", "_", experiment)[:LONGEST_NAME]
    return (folder / "mlruns" / (name or "_")).as_uri() if folder else None


def alone(uri: str) -> contextlib.AbstractContextManager[None]:
    """Let one process at a time create the tables of an sqlite file: MLflow's own lock does not suffice."""
    scheme, _, path = uri.partition(":///")
    return locked(Path(f"{path}.lock")) if scheme == "sqlite" else contextlib.nullcontext()


def without_password(uri: str) -> str:
    """Return the address without its user and password, for messages and files."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri
