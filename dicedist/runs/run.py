"""The folder of a run, with a name for every file in it. No other module builds a path inside it.

runs/NAME/
    config.yaml environment.json        what it was asked to do, and where it was done
    metrics.jsonl                       records, the same for every run of one config and seed, however often it stopped
    system.jsonl                        what depends on the machine: pace, load, memory
    checkpoints/step-00001200/          checkpoint.py
    evaluation.json logits.safetensors gallery.safetensors report.html      results
    evaluations/LABEL/                  results of some members, of another average, of an earlier step
    mirror.json                         how much of it MLflow has received
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dicedist.config import Config, parse_config, to_yaml
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.files import read_plain, replace_text

LARGEST_CONFIG, LARGEST_RESULT = 2**20, 2**28  # bytes


class Results:
    """A folder that an evaluation is written to: the folder of a run, or a separate one."""

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
        """The results of the evaluation; None if they were not written, or not completely."""
        try:
            found = json.loads(read_plain(self.result_file, LARGEST_RESULT))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write_result(self, result: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_text(self.result_file, json.dumps(result, indent=1))


class Run(Results):
    @classmethod
    def of(cls, config: Config) -> Self:
        """The run that a training with this config begins or continues."""
        return cls(Path(config.run.dir) / config.run.name)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """An existing run; ValueError if there is none."""
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
    def changes_file(self) -> Path:
        """Keys that were changed on purpose between two starts."""
        return self.directory / "changes.jsonl"

    @property
    def mirror_file(self) -> Path:
        return self.directory / "mirror.json"

    def copy_file(self, uri: str) -> Path:
        """What a second store of MLflow has received."""
        return self.directory / f"mirror-{hashlib.sha256(uri.encode()).hexdigest()[:8]}.json"

    @property
    def lock_file(self) -> Path:
        return self.directory / ".lock"

    @property
    def mirror_lock_file(self) -> Path:
        return self.directory / ".mirror.lock"

    @property
    def mark_file(self) -> Path:
        """Written by rank 0, so that the other ranks can tell whether they see the same folder."""
        return self.directory / ".mark"

    @property
    def launch_file(self) -> Path:
        """The id of the last launch: its restarts continue the run even with resume=never."""
        return self.directory / ".launch"

    @property
    def stopped_file(self) -> Path:
        """Exists while the last training of the run was ended on request."""
        return self.directory / ".stopped"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def config(self) -> Config:
        try:
            text = read_plain(self.config_file, LARGEST_CONFIG).decode()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.config_file} is missing or damaged ({error})") from error
        return parse_config(text, self.config_file)

    def save_config(self, config: Config) -> None:
        replace_text(self.config_file, to_yaml(config))

    def newest_checkpoint(self, warn: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
        return checkpoint.newest(self.checkpoints, warn)

    def checkpoint(self) -> Checkpoint:
        """The last intact checkpoint; if there is none, a ValueError says what is wrong."""
        found = self.newest_checkpoint()
        if found is None:
            raise ValueError(f"{self} has no intact checkpoint{checkpoint.what_is_wrong(self.checkpoints)}")
        return found

    def ending(self) -> str:
        """How training ended, in MLflow's words: FINISHED only if the last checkpoint and the results are whole."""
        found, result = self.newest_checkpoint(), self.result()
        if found is not None and result is not None:
            complete = found.step >= found.about.get("total_steps", found.step)
            if complete and result.get("step", found.step) == found.step:
                return "FINISHED"
        return "KILLED" if self.stopped_file.exists() else "FAILED"

    def variation(self, label: str) -> Results:
        """The results of something else than the whole run: of some members, another average, an earlier step."""
        return Results(self.directory / "evaluations" / label)

    def set_results_aside(self) -> None:
        """The run goes on: what was found after fewer steps stays beside what will be found after more."""
        found = self.result()
        if found is None:
            return
        aside = self.variation(f"step-{found.get('step', 'before')}")
        aside.directory.mkdir(parents=True, exist_ok=True)
        for old, new in (
            (self.result_file, aside.result_file),
            (self.logits_file, aside.logits_file),
            (self.gallery_file, aside.gallery_file),
            (self.report_file, aside.report_file),
        ):
            if old.exists():
                old.rename(new)

    def last_validation(self, name: str) -> float | None:
        """The last validation value of a measure, named without val/; None if there is none."""
        found = [record.get(f"val/{name}") for record in whole_records(self.records_file)]
        known = [value for value in found if value is not None]
        return known[-1] if known else None


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a file that may be missing, or still being written."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def whole_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]
