"""The folder of a run: every file in it, by name. No other module joins a path inside it.

runs/NAME/
    config.yaml environment.json        what it was asked to do, and where it was done
    metrics.jsonl                       records, the same for every run of one config and seed, however often it stopped
    system.jsonl                        what depends on the machine: pace, load, memory
    checkpoints/step-00001200/          checkpoint.py
    evaluation.json logits.safetensors gallery.safetensors report.html      results
    mirror.json                         how much of it MLflow has received
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dicedist.config import Config, parse_config, to_yaml
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import Checkpoint


class Results:
    """A folder that an evaluation is written to: that of a run, or one of its own."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def result_file(self) -> Path:
        return self.directory / "evaluation.json"

    @property
    def logits_file(self) -> Path:
        return self.directory / "logits.safetensors"

    @property
    def gallery_file(self) -> Path:
        return self.directory / "gallery.safetensors"

    @property
    def report_file(self) -> Path:
        return self.directory / "report.html"

    def result(self) -> dict[str, Any] | None:
        """What the evaluation found; None if it was not written, or not to its end."""
        try:
            return json.loads(self.result_file.read_text())
        except (OSError, ValueError):
            return None

    def write_result(self, result: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.result_file.write_text(json.dumps(result, indent=1))


class Run(Results):
    @classmethod
    def of(cls, config: Config) -> Self:
        """The run that a training with this config begins or continues."""
        return cls(Path(config.run.dir) / config.run.name)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """One that is there; ValueError otherwise."""
        run = cls(directory)
        if not run.exists():
            raise ValueError(f"{run} is not a run: it has no {run.config_file.name} (runs are folders under runs/)")
        return run

    def exists(self) -> bool:
        return self.config_file.is_file()

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def config_file(self) -> Path:
        return self.directory / "config.yaml"

    @property
    def environment_file(self) -> Path:
        return self.directory / "environment.json"

    @property
    def records_file(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def system_file(self) -> Path:
        return self.directory / "system.jsonl"

    @property
    def mirror_file(self) -> Path:
        return self.directory / "mirror.json"

    @property
    def lock_file(self) -> Path:
        return self.directory / ".lock"

    @property
    def mirror_lock_file(self) -> Path:
        return self.directory / ".mirror.lock"

    @property
    def mark_file(self) -> Path:
        """What rank 0 writes for the others to see, if they see the same folder."""
        return self.directory / ".mark"

    @property
    def launch_file(self) -> Path:
        """Which launch began the run: its restarts continue it whatever `resume` says."""
        return self.directory / ".launch"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def config(self) -> Config:
        try:
            text = self.config_file.read_text()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.config_file} is missing or damaged") from error
        return parse_config(text, self.config_file)

    def save_config(self, config: Config) -> None:
        replace_text(self.config_file, to_yaml(config))

    def newest_checkpoint(self, warn: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
        return checkpoint.newest(self.checkpoints, warn)

    def checkpoint(self) -> Checkpoint:
        """The last intact one; ValueError that says what is wrong if there is none."""
        found = self.newest_checkpoint()
        if found is None:
            raise ValueError(f"{self} has no intact checkpoint{checkpoint.what_is_wrong(self.checkpoints)}")
        return found

    def last_validation(self, name: str) -> float | None:
        """The last value of a measure of validation images, by its name without val/; None if there is none."""
        found = [record.get(f"val/{name}") for record in whole_records(self.records_file)]
        known = [value for value in found if value is not None]
        return known[-1] if known else None


def replace_text(path: Path, text: str) -> None:
    """Under its name only when it is whole."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(text)
    draft.rename(path)


def whole_lines(path: Path) -> list[str]:
    """Of a file that may be missing, or being written to right now."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def whole_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]
