"""Sends the contents of a run's folder to MLflow, line by line; `mirror.json` remembers how much was received."""

import contextlib
import errno
import fcntl
import functools
import io
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from dicedist.config import Config, flatten
from dicedist.config.compose import flat
from dicedist.console.lines import warn
from dicedist.reporting.page import pictures, write_report
from dicedist.runs.run import Run, replace_text, whole_lines
from dicedist.tracking.mlflow.model import SERVING, packed

INTERVAL = 2.0  # seconds between two looks at the records
PATIENCE = 60.0  # seconds without an answer before it gives up, once training has ended
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # MLflow's limits for one call
UNANSWERED = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # anything else is a refusal
UNSTORABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
T = TypeVar("T")
ENDINGS = ("FINISHED", "KILLED", "FAILED")


@contextlib.contextmanager
def only_one(run: Run, wait: bool) -> Iterator[None]:
    """Locks the run for one mirror. wait: a restarted run may begin before the mirror of its last attempt has ended."""
    with run.mirror_lock_file.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ValueError(f"the records of {run} are being sent already") from error
        yield


class Mirror:
    def __init__(self, run: Run, config: Config):
        # By default mlflow retries for minutes; here the next look at the records is the retry.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # the machine may have no git
        self.run, self.config = run, config
        self.uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self.shown = without_password(self.uri)
        self.state: dict[str, Any] = {"uri": self.shown, "run_id": None, "received": {}, "status": "RUNNING"}
        if (saved := read_json(run.mirror_file)).get("uri") == self.shown:
            self.state |= saved
        self.told: set[str] = set()

    @functools.cached_property
    def client(self) -> Any:
        """The first client creates the tables of an sqlite file: of several runs that start at once, only one does."""
        from mlflow import MlflowClient

        with alone(folder_of(self.uri)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from alembic, about tables that it recreates
            client = MlflowClient(self.uri)
            client.search_experiments(max_results=1)
        return client

    def follow(self) -> None:
        """Sends records until training says how it ended, or ends without a word."""
        ended = threading.Event()
        last_word = ["FAILED"]

        def listen() -> None:
            last_word[0] = sys.stdin.readline().strip() or "FAILED"
            ended.set()

        threading.Thread(target=listen, daemon=True).start()
        self.keep(status="RUNNING", completed=[])
        self.attempt(self.begin)
        while not ended.wait(INTERVAL):
            self.attempt(self.send_records)
        self.keep(status=last_word[0])

    def finish(self) -> bool:
        """Sends everything that is left; returns whether it was received."""
        silent_since = time.monotonic()
        tasks: list[Callable[[], None]] = [self.begin, self.send_records]
        if self.state["status"] == "FINISHED":
            tasks += [self.send_result, self.send_files, *([self.send_model] if self.config.tracking.model else [])]
        for task in [*tasks, self.send_status]:
            while not self.attempt(task):
                if time.monotonic() - silent_since > PATIENCE:
                    return False
                time.sleep(INTERVAL)
            silent_since = time.monotonic()
        return True

    def attempt(self, task: Callable[[], None]) -> bool:
        """Returns False if the task must be tried again because the server did not answer; warns once per problem."""
        name = task.__name__
        if name in self.state.get("completed", []):
            return True
        try:
            task()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in UNSTORABLE:
                self.tell(f"could not {name.replace('_', ' ')} (`python -m dicedist.mirror` tries again)", error)
            elif isinstance(error, OSError) or getattr(error, "error_code", None) in UNANSWERED:
                self.tell("does not answer", error)
                return False
            else:
                self.tell(f"refuses to {name.replace('_', ' ')}", error)
        return True

    def tell(self, what: str, error: Exception) -> None:
        """Warns only once: the same may happen every other second for days."""
        if what not in self.told:
            reason = " ".join(str(error).split())[:200]
            warn(f"MLflow at {self.shown} {what}, records wait in {self.run}: {reason}")
            self.told.add(what)

    def begin(self) -> None:
        """Creates the run in MLflow, or reopens the one that was created before."""
        if self.state["run_id"] is not None:
            self.client.update_run(self.state["run_id"], status="RUNNING")
            self.client.log_batch(self.state["run_id"], tags=self.tags())
            return
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        # Without this tag MLflow's pages treat it as an experiment with language models.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        if experiment is None:
            number = self.client.create_experiment(name, files_of(self.uri, name), tags=kind)
        else:
            number = experiment.experiment_id
        made = self.client.create_run(number, run_name=self.config.run.name)
        self.keep(run_id=made.info.run_id)
        self.client.log_batch(made.info.run_id, tags=self.tags())
        for some in chunks(self.parameters(), MOST_PARAMS):
            self.client.log_batch(made.info.run_id, params=some)

    def parameters(self) -> list[Any]:
        from mlflow.entities import Param

        return [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flatten(self.config).items()]

    def tags(self) -> list[Any]:
        from mlflow.entities import RunTag

        about = {"run": str(self.run.directory.resolve()), **read_json(self.run.environment_file)}
        tags = [RunTag(f"dicedist.{key}", str(value)) for key, value in about.items()]
        known = {
            "mlflow.source.name": "dicedist.train",
            "mlflow.source.git.commit": about.get("git_commit"),
            "mlflow.user": os.environ.get("USER"),
        }
        return [*tags, *(RunTag(key, value) for key, value in known.items() if value)]

    def send_records(self) -> None:
        if self.state["run_id"] is None:
            self.begin()
        for path in (self.run.records_file, self.run.system_file):
            received = self.state["received"].get(path.name, 0)
            lines = whole_lines(path)[received:]
            # A run that went back to a checkpoint writes the same lines again: those already received are skipped.
            for some in chunks(lines, 20):
                metrics = [metric for line in some for metric in as_metrics(json.loads(line))]
                for batch in chunks(metrics, MOST_METRICS):
                    self.client.log_batch(self.state["run_id"], metrics=batch)
                received += len(some)
                self.keep(received={**self.state["received"], path.name: received})

    def send_result(self) -> None:
        measures = flat(read_json(self.run.result_file))
        values = {f"test/{name.replace('.', '/')}": value for name, value in measures.items() if is_number(value)}
        metrics = as_metrics({"step": 0, **values})
        for batch in chunks(metrics, MOST_METRICS):
            self.client.log_batch(self.state["run_id"], metrics=batch)
        self.complete("send_result")

    def send_files(self) -> None:
        run = self.run
        write_report([run], run.report_file)
        for name, picture in pictures(run.report_file.read_text()).items():
            self.client.log_text(self.state["run_id"], picture, f"figures/{name}.svg")
        for path in (run.config_file, run.environment_file, run.result_file, run.records_file, run.report_file):
            if path.exists():
                self.client.log_artifact(self.state["run_id"], str(path))
        self.complete("send_files")

    def send_model(self) -> None:
        """Logs the ensemble as one model without pickle, and registers it if tracking.register gives a name."""
        import mlflow

        mlflow.set_tracking_uri(self.uri)
        name = self.config.tracking.register
        silence = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, silence, mlflow.start_run(run_id=self.state["run_id"]):
            about = packed(self.run, self.config.tracking.model, Path(folder) / "ensemble.pt2")
            if name and (other := self.taken(name, about["signature"])):
                warn(
                    f"tracking.register={name}: {other} has another signature (images or classes), so the ensemble was "
                    f"logged but not registered; register it under another name from MLflow's page of this run"
                )
                name = None
            mlflow.pyfunc.log_model(name="ensemble", python_model=str(SERVING), registered_model_name=name, **about)
        self.complete("send_model")

    def taken(self, name: str, signature: Any) -> str | None:
        """The last version of that model, if its inputs or outputs differ."""
        import mlflow

        versions = self.client.search_model_versions(f"name = '{name}'")
        if not versions:
            return None
        last = max(versions, key=lambda version: int(version.version))
        known = mlflow.models.get_model_info(f"models:/{name}/{last.version}").signature
        return None if known == signature else f"version {last.version} of that model"

    def send_status(self) -> None:
        if self.state["status"] in ENDINGS:
            self.client.set_terminated(self.state["run_id"], self.state["status"])

    def complete(self, task: str) -> None:
        self.keep(completed=[*self.state.get("completed", []), task])

    def keep(self, **changes: Any) -> None:
        self.state |= changes
        replace_text(self.run.mirror_file, json.dumps(self.state))


def folder_of(uri: str) -> Path | None:
    """The folder of an sqlite file; None if a server holds the database."""
    scheme, _, path = uri.partition(":///")
    return Path(path).resolve().parent if scheme == "sqlite" else None


def files_of(uri: str, experiment: str) -> str | None:
    """Artifacts go beside an sqlite file; MLflow would use the working directory. None: the server decides."""
    folder = folder_of(uri)
    return (folder / "mlruns" / experiment).as_uri() if folder else None


@contextlib.contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """Only one process at a time gets past this with the same folder."""
    if folder is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def without_password(uri: str) -> str:
    """The URI as shown in messages and files."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def as_metrics(record: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    now, step = round(1000 * record.get("time", time.time())), int(record["step"])
    values = {name: value for name, value in record.items() if name not in ("step", "time") and is_number(value)}
    return [Metric(name, float(value), now, step) for name, value in values.items()]


def chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
