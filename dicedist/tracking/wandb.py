"""Weights & Biases as a destination: online with an API key, otherwise offline, in the folder wandb/ of the run.

A resumed run continues the same run in W&B. W&B refuses decreasing steps, so steps that run again after a crash are
skipped.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from dicedist.config import Config, flatten
from dicedist.console.lines import say
from dicedist.evaluation.formats import export, images_to_check
from dicedist.evaluation.loading import load_ensemble
from dicedist.reporting.svg import Figure
from dicedist.runs.run import Run
from dicedist.tracking.destination import Destination, numbers_in
from dicedist.tracking.mirror import FINISHED, PATIENCE
from dicedist.tracking.state import State

INIT_TIMEOUT = 20.0  # seconds
UNFIT = re.compile(r"[^\w.-]")  # in the name of an artifact


class WeightsAndBiases(Destination):
    name = "wandb"
    variables = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}

    def __init__(self, run: Run, config: Config):
        super().__init__(run, config)
        self.state = State(run.mirror_file(self.name), step=0)  # the last step that W&B has
        self.is_online = os.environ.get("WANDB_MODE", "online" if wandb.api.api_key else "offline") == "online"
        self.opened: Any = None
        self.unsent: str | None = None  # folder with data that was not uploaded in time

    @property
    def shown(self) -> str:
        return str(wandb.api.settings("base_url")) if self.is_online else str(self.run)

    @property
    def remedy(self) -> str:
        return f"wandb sync {self.unsent}" if self.unsent else super().remedy

    def begin(self) -> bool:
        if self.opened is not None:
            return False
        is_new = self.state["run_id"] is None
        self.opened = wandb.init(
            project=self.config.tracking.experiment,
            name=self.config.run.name,
            id=self.state["run_id"],
            resume="allow" if self.is_online and not is_new else None,
            group=self.config.tracking.study,
            config=flatten(self.run.plan().resolve(self.config)),
            dir=str(self.run.wandb_folder.parent),
            mode="online" if self.is_online else "offline",
            reinit="create_new",
            settings=wandb.Settings(
                console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True,
                init_timeout=INIT_TIMEOUT, finish_timeout=PATIENCE, finish_timeout_raises=True,
            ),
        )  # fmt: skip
        if is_new:
            self.state.keep(run_id=self.opened.id, step=0)
        return is_new

    def send_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if record["step"] >= self.state["step"]:
                self.opened.log(numbers_in(record), step=record["step"])
                self.state.values["step"] = record["step"]

    def send_result(self, values: Mapping[str, float]) -> None:
        self.opened.summary.update(dict(values))

    def send_files(self, figures: Mapping[str, Figure], files: Sequence[Path]) -> None:
        """Log the report and its figures, and the files as an artifact, because W&B has its own config.yaml."""
        pages = {f"figures/{name}": wandb.Html(figure.svg, inject=False) for name, figure in figures.items()}
        pages["report"] = wandb.Html(self.run.report_file.read_text("utf-8"), inject=False)
        self.opened.log(pages, step=self.state["step"])
        artifact = wandb.Artifact(self.artifact_name("files"), type="run")
        for path in files:
            artifact.add_file(str(path))
        self.opened.log_artifact(artifact)

    def send_model(self) -> None:
        """Send the ensemble as a torch.export program."""
        images, trusted = self.config.tracking.model or "uint8", self.config.network.trusted
        ensemble = load_ensemble(self.run, images=images, trusted=trusted)
        artifact = wandb.Artifact(self.artifact_name("ensemble"), type="model")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ensemble.pt2"
            export(ensemble, path, "pt2", images_to_check(self.run, ensemble.about)[0])
            artifact.add_file(str(path))
            self.opened.log_artifact(artifact)

    def artifact_name(self, kind: str) -> str:
        return f"{UNFIT.sub('-', self.run.name)}-{kind}"

    def close(self, status: str) -> None:
        folder, self.unsent = self.opened.settings.sync_dir, self.opened.settings.sync_dir
        self.opened.finish(exit_code=0 if status == FINISHED else 1)  # may raise TimeoutError
        self.opened, self.unsent = None, None
        self.state.keep()
        if not self.is_online:
            say(f"Weights & Biases is offline: `wandb sync {folder}` uploads the run")

    def is_silent(self, error: Exception) -> bool:
        return super().is_silent(error) or isinstance(error, wandb.errors.CommError)
