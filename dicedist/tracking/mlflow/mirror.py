"""Brings MLflow to the state of a run's folder, whenever it is started; mirror.json remembers what was received.

The status of the run in MLflow follows from the files of the folder (`Run.ending`).
"""

import contextlib
import errno
import functools
import getpass
import hashlib
import io
import json
import logging
import os
import select
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from dicedist.config import Config, flatten
from dicedist.config.compose import flat
from dicedist.console.lines import warn
from dicedist.data.remote import reason_of
from dicedist.metrics.measures import FRESH_REDUNDANCY
from dicedist.reporting.page import figures, write_own_report
from dicedist.runs.files import replace_json
from dicedist.runs.run import Run, whole_lines
from dicedist.tracking.mlflow.model import SERVING, packed
from dicedist.tracking.mlflow.store import alone, files_of, read_or_nothing, without_password

INTERVAL = 2.0  # seconds between two looks at the records
PATIENCE = 60.0  # seconds without an answer before it gives up, once training has ended
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # MLflow's limits for one call
UNANSWERED = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # anything else is a refusal
UNSTORABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # not for minutes: the next look at the records is the retry
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",  # the machine may have no git
}
T = TypeVar("T")
FINISHED = "FINISHED"


class Mirror:
    def __init__(self, run: Run, config: Config, uri: str):
        """uri: the store, with credentials if need be."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3"):  # they log a traceback for every call that fails
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self.run, self.config, self.uri = run, config, uri
        self.shown = without_password(self.uri)
        self.state: dict[str, Any] = {"uri": self.shown, "run_id": None, "received": {}, "sent": {}}
        # A copy in a second store has a file of its own, and the first stays what it was.
        elsewhere = read_or_nothing(run.mirror_file).get("uri") not in (None, self.shown)
        self.state_file = run.copy_file(self.shown) if elsewhere else run.mirror_file
        self.state |= read_or_nothing(self.state_file)
        self.problems: set[str] = set()  # that the user was warned of
        self.refused = False
        self.unsure = self.state["run_id"] is not None  # whether MLflow may have more than the state says

    @functools.cached_property
    def client(self) -> Any:
        """MLflow's client. The first one creates the tables of an sqlite file."""
        from mlflow import MlflowClient

        with alone(self.uri), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from alembic, about tables that it recreates
            client = MlflowClient(self.uri)
            client.search_experiments(max_results=1)
        return client

    def follow(self) -> None:
        """Send records until training closes its end of the pipe, as it also does when it dies."""
        self.attempt(self.begin)
        while not select.select([sys.stdin], [], [], INTERVAL)[0]:
            self.attempt(self.send_records)

    def finish(self) -> bool:
        """Send everything that is left. Return whether all of it was received."""
        silent_since = time.monotonic()
        tasks: list[Callable[[], None]] = [self.begin, self.send_records]
        if self.run.ending() == FINISHED:
            tasks += [self.send_result, self.send_files, *([self.send_model] if self.config.tracking.model else [])]
        for task in [*tasks, self.send_status]:
            while not self.attempt(task):
                if time.monotonic() - silent_since > PATIENCE:
                    return False
                time.sleep(INTERVAL)
            silent_since = time.monotonic()
        return not self.refused

    def attempt(self, task: Callable[[], None]) -> bool:
        """Return False if the task must be tried again because the server did not answer.

        Warn only once of each problem: it may come back every other second for days.
        """
        name = task.__name__.replace("_", " ")
        try:
            task()
            return True
        except Exception as caught:
            error = caught
        self.unsure = True  # it may have arrived all the same
        unanswered = isinstance(error, OSError) or getattr(error, "error_code", None) in UNANSWERED
        if isinstance(error, OSError) and error.errno in UNSTORABLE:
            problem, unanswered = f"could not {name} (`python -m dicedist.mirror` tries again)", False
        else:
            problem = "does not answer" if unanswered else f"refuses to {name}"
        if problem not in self.problems:
            warn(f"MLflow at {self.shown} {problem}, records wait in {self.run}: {reason_of(error)}")
        self.problems.add(problem)
        self.refused |= not unanswered
        return not unanswered

    def begin(self) -> None:
        """Create the run in MLflow, or open the one that was created before."""
        if self.state["run_id"] is not None:
            self.client.update_run(self.state["run_id"], status="RUNNING")
            self.client.log_batch(self.state["run_id"], tags=self.tags())
            return
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        # Without the tag MLflow's pages take it for an experiment with language models.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        if experiment is None:
            number = self.client.create_experiment(name, files_of(self.uri, name), tags=kind)
        else:
            number = experiment.experiment_id
        made = self.client.create_run(number, run_name=self.config.run.name)
        self.keep(run_id=made.info.run_id)
        self.client.log_batch(made.info.run_id, tags=[*self.tags(), link_to_report(self.run, number, made.info.run_id)])
        for some in chunks(self.parameters(), MOST_PARAMS):
            self.client.log_batch(made.info.run_id, params=some)
        self.client.log_inputs(made.info.run_id, datasets=[self.data_set()])

    def parameters(self) -> list[Any]:
        """Every key, with the value to which `auto` was resolved."""
        from mlflow.entities import Param

        plan = self.run.plan()
        values = flatten(plan.resolve(self.config))
        if "redundancy" in self.config.method.terms:
            values["redundancy.delta.resolved"] = self.config.redundancy.delta_for(plan.num_members)
        return [Param(key, str(value)[:LONGEST_PARAM]) for key, value in values.items()]

    def tags(self) -> list[Any]:
        from mlflow.entities import RunTag

        about = {
            "run": str(self.run.directory.resolve()),
            "members": self.run.plan().num_members,
            **read_or_nothing(self.run.environment_file),
        }
        tags = [RunTag(f"dicedist.{key}", str(value)) for key, value in about.items()]
        known = {
            "mlflow.source.name": "dicedist.train",
            "mlflow.source.git.commit": about.get("git_commit"),
            "mlflow.user": user(),
        }
        return [*tags, *(RunTag(key, value) for key, value in known.items() if value)]

    def data_set(self) -> Any:
        """The training images, as MLflow's page of a run shows them."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = self.config.data
        digest = str(read_or_nothing(self.run.environment_file).get("data_digest", "unknown"))[:36]
        source = json.dumps({"data": data.name, "root": data.root, "split": data.split, "limit": data.train_limit})
        return DatasetInput(
            Dataset(name=data.name, digest=digest, source_type="local", source=source),
            tags=[InputTag("mlflow.data.context", "training")],
        )

    def send_records(self) -> None:
        if self.state["run_id"] is None:
            self.begin()
        for path in (self.run.records_file, self.run.system_file):
            lines, received = whole_lines(path), self.state["received"].get(path.name, 0)
            # After a run goes back to a checkpoint, it writes the same lines again: those are skipped. They are others
            # if the user changed how often a record is written.
            if self.differs(path.name, lines[:received]):
                known, received = self.steps_in_mlflow(lines), 0
            else:
                known = self.steps_in_mlflow(lines[received:]) if self.unsure else set()
            for some in chunks(lines[received:], 20):
                metrics = [metric for line in some for metric in as_metrics(json.loads(line))]
                new = [metric for metric in metrics if (metric.key, metric.step) not in known]
                for batch in chunks(new, MOST_METRICS):
                    self.client.log_batch(self.state["run_id"], metrics=batch)
                received += len(some)
                marks = {**self.state.get("marks", {}), path.name: digest_lines(lines[:received])}
                self.keep(received={**self.state["received"], path.name: received}, marks=marks)
        self.unsure = False

    def differs(self, name: str, lines: Sequence[str]) -> bool:
        """Return whether the lines that were sent are no longer those of the file."""
        mark = self.state.get("marks", {}).get(name)
        return mark is not None and len(lines) == self.state["received"][name] and digest_lines(lines) != mark

    def steps_in_mlflow(self, lines: Sequence[str]) -> set[tuple[str, int]]:
        """Return the names and steps that MLflow has of the metrics in these lines."""
        names = {name for line in lines for name, value in json.loads(line).items() if is_number(value)}
        return {
            (name, metric.step)
            for name in names - {"step", "time"}
            for metric in self.client.get_metric_history(self.state["run_id"], name)
        }

    def send_result(self) -> None:
        """Send every number of the evaluation, and the redundancy as the mean over pairs."""
        if self.is_sent("result"):
            return
        result = read_or_nothing(self.run.result_file)
        fresh = result.get("redundancy_fresh") or {}
        estimates = {"redundancy": result.get("redundancy")} | {
            f"redundancy_fresh.{kind}": fresh.get(kind) for kind in FRESH_REDUNDANCY
        }
        nats = {f"{name}.nats": fmean(found["nats_P"]) for name, found in estimates.items() if found}
        measures = flat(result) | nats
        values = {f"test/{name.replace('.', '/')}": value for name, value in measures.items() if is_number(value)}
        for batch in chunks(as_metrics({"step": 0, **values}), MOST_METRICS):
            self.client.log_batch(self.state["run_id"], metrics=batch)
        self.mark_sent("result")

    def send_files(self) -> None:
        if self.is_sent("files"):
            return
        run = self.run
        if not run.report_file.is_file() or run.report_file.is_symlink():
            write_own_report(run)
        with contextlib.suppress(ValueError):  # the page of an earlier version is sent without figures
            for name, figure in figures([run]).items():
                self.client.log_text(self.state["run_id"], figure.svg, f"figures/{name}.svg")
        for path in (run.config_file, run.environment_file, run.result_file, run.records_file, run.report_file):
            if path.is_file() and not path.is_symlink():  # which could lead to any file of the user
                self.client.log_artifact(self.state["run_id"], str(path))
        self.mark_sent("files")

    def send_model(self) -> None:
        """Send the ensemble as one model, which runs no pickle. Register it if it is given a name."""
        if self.state["sent"].get("model") == self.run.checkpoint().step:
            return
        import mlflow

        mlflow.set_tracking_uri(self.uri)
        name, trusted = self.config.tracking.register, self.config.network.trusted
        silence = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, silence, mlflow.start_run(run_id=self.state["run_id"]):
            about = packed(self.run, self.config.tracking.model, Path(folder) / "ensemble.pt2", trusted)
            if name and (other := self.taken(name, about["signature"])):
                warn(
                    f"tracking.register={name}: {other} has another signature (images or classes), so the ensemble was "
                    f"logged but not registered; register it under another name from MLflow's page of this run"
                )
                name = None
            mlflow.pyfunc.log_model(name="ensemble", python_model=str(SERVING), registered_model_name=name, **about)
        self.keep(sent={**self.state["sent"], "model": self.run.checkpoint().step})

    def taken(self, name: str, signature: Any) -> str | None:
        """Name the last version of that model if this one has other inputs or lacks some of its outputs."""
        import mlflow

        versions = self.client.search_model_versions(f"name = '{name}'")
        if not versions:
            return None
        last = max(versions, key=lambda version: int(version.version))
        known = mlflow.models.get_model_info(f"models:/{name}/{last.version}").signature
        lacking = [output for output in known.outputs or () if output not in (signature.outputs or ())]
        same = known.inputs == signature.inputs and not lacking
        return None if same else f"version {last.version} of that model"

    def send_status(self) -> None:
        self.client.set_terminated(self.state["run_id"], self.run.ending())

    def is_sent(self, task: str) -> bool:
        """Return whether the task was done for the evaluation that the folder holds now."""
        return self.state["sent"].get(task) == digest_of(self.run.result_file)

    def mark_sent(self, task: str) -> None:
        self.keep(sent={**self.state["sent"], task: digest_of(self.run.result_file)})

    def keep(self, **changes: Any) -> None:
        self.state |= changes
        replace_json(self.state_file, self.state)


def link_to_report(run: Run, experiment: str, run_id: str) -> Any:
    """The description on MLflow's page of the run."""
    from mlflow.entities import RunTag

    page = f"#/experiments/{experiment}/runs/{run_id}/artifacts/{run.report_file.name}"
    return RunTag("mlflow.note.content", f"The [report]({page}) of this run appears here when it has finished.")


def user() -> str | None:
    """Return the name of the user; a container may know none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def digest_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def as_metrics(record: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    now, step = round(1000 * record.get("time", time.time())), int(record["step"])
    values = {name: value for name, value in record.items() if name not in ("step", "time") and is_number(value)}
    return [Metric(name, float(value), now, step) for name, value in values.items()]


def chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
