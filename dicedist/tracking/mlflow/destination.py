"""MLflow as a destination: a run with its parameters, metrics, data set, files and logged model."""

import contextlib
import functools
import getpass
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dicedist.config import Config, flatten
from dicedist.reporting.svg import Figure
from dicedist.runs.run import Run
from dicedist.tracking.destination import Destination, numbers_in
from dicedist.tracking.mirror import FINISHED, chunks, values_of
from dicedist.tracking.mlflow.model import SERVING, packed
from dicedist.tracking.mlflow.registry import crown, logged_name, name_to_register, validation_nll
from dicedist.tracking.mlflow.store import alone, chosen_store, files_of, without_password
from dicedist.tracking.mlflow.study import parent_of
from dicedist.tracking.state import State, read_or_nothing

MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # MLflow's limits for one call
LONGEST_DIGEST = 36
SILENT = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # anything else is a refusal
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # not for minutes: the mirror itself retries
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",  # the machine may have no git
}
SOURCE = "dicedist.train"
ENDED = {
    "KILLED": "Training was stopped on request; the same command continues it.",
    "FAILED": "Training ended before its last step; the same command continues it.",
}


class MLflow(Destination):
    name = "mlflow"
    variables = VARIABLES

    def __init__(self, run: Run, config: Config):
        super().__init__(run, config)
        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3"):  # each logs a traceback for every failed call
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self.uri = chosen_store(config.tracking.uri)
        if self.state.values.get("uri", self.shown) != self.shown:  # another store has its own state file
            self.state = State(run.copy_file(self.shown))
        self.state.values["uri"] = self.shown

    @property
    def shown(self) -> str:
        return without_password(self.uri)

    @property
    def remedy(self) -> str:
        return super().remedy + (f" tracking.uri={self.shown}" if self.config.tracking.uri else "")

    @functools.cached_property
    def client(self) -> Any:
        """MLflow's client. The first one creates the tables of an sqlite file."""
        from mlflow import MlflowClient

        with alone(self.uri), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from alembic, about tables that it recreates
            client = MlflowClient(self.uri)
            client.search_experiments(max_results=1)
        return client

    @functools.cached_property
    def experiment(self) -> str:
        """The id of the experiment, which is created if needed."""
        name = self.config.tracking.experiment
        if (found := self.client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        # Without the tag MLflow shows the pages for language models.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return self.client.create_experiment(name, files_of(self.uri, name), tags=kind)

    @property
    def run_id(self) -> str:
        return self.state["run_id"]

    def begin(self) -> bool:
        is_new = self.state["run_id"] is None
        if is_new:
            made = self.client.create_run(self.experiment, run_name=self.config.run.name)
            self.state.keep(run_id=made.info.run_id, described=False)
        self.client.update_run(self.run_id, status="RUNNING")
        self.client.log_batch(self.run_id, tags=self.tags())
        if not self.state.values.get("described", True):  # the server may have failed between two of these calls
            for some in chunks(self.parameters(), MOST_PARAMS):
                self.client.log_batch(self.run_id, params=some)
            self.client.log_inputs(self.run_id, datasets=[self.data_set("training")])
            self.note(f"{self.link_to_report()}: appears here when the run has finished.")
            self.state.keep(described=True)
        return is_new

    def parameters(self) -> list[Any]:
        """Return every key with its resolved value."""
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
        study = self.config.tracking.study
        known = {
            "mlflow.source.name": SOURCE,
            "mlflow.source.git.commit": about.get("git_commit"),
            "mlflow.user": user(),
            "mlflow.parentRunId": parent_of(self.client, self.experiment, study) if study else None,
        }
        return [*tags, *(RunTag(key, value) for key, value in known.items() if value)]

    @property
    def digest(self) -> str:
        """The digest of the data and their split."""
        return str(read_or_nothing(self.run.environment_file).get("data_digest", "unknown"))[:LONGEST_DIGEST]

    @property
    def test_set(self) -> str:
        return f"{self.config.data.name}-test"

    def data_set(self, context: str) -> Any:
        """Return the data set of the run for MLflow's pages. context: training or testing."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = self.config.data
        source = json.dumps({"data": data.name, "root": data.root, "split": data.split, "limit": data.train_limit})
        name = data.name if context == "training" else self.test_set
        return DatasetInput(
            Dataset(name=name, digest=self.digest, source_type="local", source=source),
            tags=[InputTag("mlflow.data.context", context)],
        )

    def known(self, records: Sequence[Mapping[str, Any]]) -> set[tuple[str, int]]:
        names = {name for record in records for name in numbers_in(record)}
        return {(name, one.step) for name in names for one in self.client.get_metric_history(self.run_id, name)}

    def send_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(1000 * record.get("time", time.time())), int(record["step"]))
            for record in records
            for name, value in numbers_in(record).items()
        ]
        for some in chunks(metrics, MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=some)

    def send_result(self, values: Mapping[str, float]) -> None:
        """Send the results on the test set, as metrics of the run and, once it is logged, of the model.

        The metrics carry the time of the results' file, so that sending them twice creates no duplicates.
        """
        from mlflow.entities import Metric

        model = self.state.values.get("model_id")
        whose = {"model_id": model, "dataset_name": self.test_set, "dataset_digest": self.digest} if model else {}
        if model:
            self.client.log_inputs(self.run_id, datasets=[self.data_set("testing")])
        measured = round(1000 * self.run.result_file.stat().st_mtime) if values else 0
        metrics = [Metric(name, value, measured, 0, **whose) for name, value in values.items()]
        for some in chunks(metrics, MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=some)

    def send_files(self, figures: Mapping[str, Figure], files: Sequence[Path]) -> None:
        for name, figure in figures.items():
            self.client.log_text(self.run_id, figure.svg, f"figures/{name}.svg")
        for path in files:
            self.client.log_artifact(self.run_id, str(path))

    def send_model(self) -> None:
        """Log the ensemble as one model without pickle, with its results. Register it if tracking.register is set."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        mlflow.set_tracking_uri(self.uri)
        step, silence = self.run.checkpoint().step, contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, silence:
            about = packed(
                self.run, self.config.tracking.model, Path(folder) / "ensemble.pt2", self.config.network.trusted
            )
            register = name_to_register(self.client, self.config.tracking.register, about)
            params = {param.key: param.value for param in self.parameters()}
            model = self.client.create_logged_model(
                self.client.get_run(self.run_id).info.experiment_id,
                logged_name(self.run.name),
                source_run_id=self.run_id,
                tags={"mlflow.source.name": SOURCE, "mlflow.user": user() or ""},
                params=params,
            )
            logged = mlflow.pyfunc.log_model(
                name=model.name,
                model_id=model.model_id,
                python_model=str(SERVING),
                registered_model_name=register,
                **about,
            )
        self.client.log_outputs(self.run_id, models=[LoggedModelOutput(model.model_id, step)])
        self.state.keep(model_id=model.model_id)
        if register:
            nll = validation_nll(self.run, step)
            crown(self.client, register, logged.registered_model_version, nll, self.digest)
        self.send_result(values_of(self.run))

    def close(self, status: str) -> None:
        self.note(f"{self.link_to_report()}: {in_words(self.run)}" if status == FINISHED else ENDED[status])
        self.client.set_terminated(self.run_id, status)

    def note(self, text: str) -> None:
        """Set the description on MLflow's page of the run."""
        self.client.set_tag(self.run_id, "mlflow.note.content", text)

    def link_to_report(self) -> str:
        experiment = self.client.get_run(self.run_id).info.experiment_id
        page = f"#/experiments/{experiment}/runs/{self.run_id}/artifacts/{self.run.report_file.name}"
        return f"[Report]({page})"

    def is_silent(self, error: Exception) -> bool:
        return super().is_silent(error) or getattr(error, "error_code", None) in SILENT


def in_words(run: Run) -> str:
    """Return the main results of a finished run as text."""
    result = run.result() or {}
    ensemble, members = result.get("ensemble", {}), result.get("members", {})
    figures = {
        "accuracy of the ensemble": ensemble.get("accuracy"),
        "of the mean member": members.get("accuracy"),
        "calibration error": ensemble.get("ece"),
    }
    return ", ".join(f"{name} {100 * value:.2f} %" for name, value in figures.items() if value is not None)


def user() -> str | None:
    """Return the user's name; None in a container without users."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
