"""The folder of a run and the path of every file in it. No other module builds a path inside a run's folder.

runs/NAME/
    config.yaml plan.json               the settings, and the values that they resolved to
    environment.json                    machine, versions and placement
    metrics.jsonl                       records, the same for every run of one config and seed, however often it stopped
    system.jsonl                        records that depend on the machine: pace, load, memory
    checkpoints/step-00001200/          checkpoint.py
    evaluation.json logits.safetensors gallery.safetensors report.html      results
    evaluations/LABEL/                  results of some members, of another average, of an earlier step
    ensemble.pt2 member-0.onnx ...      files that `export` wrote
    mirror.json mirror-wandb.json ...   how much each tracker has received
    events.out.tfevents... wandb/       files of TensorBoard and of Weights & Biases
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dicedist.config import Config, parse_config, to_yaml
from dicedist.config.plan import Plan
from dicedist.console.lines import warn
from dicedist.runs import checkpoint
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.files import own_folder, read_plain, replace_text
from dicedist.runs.results import Inside, Results, origin

CONFIG, PLAN = "config.yaml", "plan.json"
LARGEST_CONFIG, LARGEST_RECORDS = 2**20, 2**32  # bytes


class Run(Results):
    pinned: int | None = None  # open descriptor of the folder, which stays valid after a rename
    moved_from: Path | None = None  # the path when it was pinned, if the folder has moved
    bucket: Bucket | None = None  # the source of the folder, for a run that was opened by a URL

    config_file = Inside(CONFIG)
    plan_file = Inside(PLAN)
    environment_file = Inside("environment.json")
    records_file = Inside("metrics.jsonl")
    system_file = Inside("system.jsonl")
    changes_file = Inside("changes.jsonl")  # log of the keys that were changed on purpose between two starts
    lock_file = Inside(".lock")
    mark_file = Inside(".mark")  # rank 0 writes it, so that the other ranks can check that they see the same folder
    launch_file = Inside(".launch")  # the id of the last launch: its restarts continue the run even with resume=never
    stopped_file = Inside(".stopped")  # exists if the last training of the run was stopped on request

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the run that a training with this config begins or continues."""
        return cls(Path(config.run.dir) / config.run.name)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open an existing run, in a folder or at a URL; ValueError if there is none."""
        if is_url(directory):
            return cls.copied(Bucket.at(str(directory), str(directory)))
        run = cls(directory)
        if not run.exists():
            raise ValueError(f"{run} is not a run: it has no {run.config_file.name} (runs are folders under runs/)")
        return run

    @classmethod
    def open_all(cls, name: str | Path) -> list[Self]:
        """Open a run, or all runs in the folder of a sweep. Other files, such as logs, are ignored."""
        if is_url(name):
            return [cls.copied(bucket) for bucket in Bucket.at(str(name), str(name)).holding(CONFIG)]
        path = Path(name)
        if path.is_file():
            return []
        inside = cls.all_in(path)
        return inside if inside and not cls(path).exists() else [cls.open(path)]

    @classmethod
    def copied(cls, bucket: Bucket) -> Self:
        """Copy a run from a bucket to this machine. Its checkpoint is copied on first use."""
        from dicedist.runs import copies  # not above: it imports this module

        run = cls(copies.copy_of(bucket))
        run.bucket = bucket
        return run

    @classmethod
    def all_in(cls, folder: Path, below: str = "*") -> list[Self]:
        """Return the runs in the subfolders of a folder. below="**": at any depth, including the folder itself."""
        return [cls(config.parent) for config in sorted(folder.glob(f"{below}/{CONFIG}"))]

    def pin(self) -> None:
        """Open the folder, so that `follow` finds it after a rename."""
        if sys.platform == "linux":
            self.pinned = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def follow(self) -> bool:
        """Return whether the pinned folder has kept its path. If it was renamed, use the new path."""
        if self.pinned is None:
            return True
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.directory), os.fstat(self.pinned)):
                return self.moved_from is None
        self.moved_from = self.moved_from or self.directory
        found = Path(os.readlink(f"/proc/self/fd/{self.pinned}"))
        self.directory = found if found.is_dir() else self.directory
        return False

    def exists(self) -> bool:
        return self.config_file.is_file()

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def place_of(self, name: str) -> Path:
        """Return the path of a file by its name in a bucket, which is relative to the run's folder."""
        path = self.directory
        for folder in Path(name).parts[:-1]:
            path = own_folder(path / folder)
        return path / Path(name).name

    def trace_file(self, rank: int) -> Path:
        return own_folder(self.directory / "traces") / f"rank-{rank}.json"

    def mirror_file(self, tracker: str) -> Path:
        """Return the file with the state of a tracker. MLflow's has no name in it: once it was the only tracker."""
        return self.directory / ("mirror.json" if tracker == "mlflow" else f"mirror-{tracker}.json")

    @property
    def event_files(self) -> list[Path]:
        """The files that TensorBoard reads."""
        return sorted(self.directory.glob("events.out.tfevents.*"))

    def copy_file(self, uri: str) -> Path:
        """Return the file with the state of a second MLflow store."""
        return self.directory / f"mirror-{hashlib.sha256(uri.encode()).hexdigest()[:8]}.json"

    @property
    def wandb_folder(self) -> Path:
        """The folder that Weights & Biases creates in the run's folder."""
        return own_folder(self.directory / "wandb")

    def mirror_lock_file(self, tracker: str) -> Path:
        return self.directory / f".mirror-{tracker}.lock"

    @property
    def checkpoints(self) -> Path:
        return own_folder(self.directory / "checkpoints")

    @property
    def files_to_send(self) -> list[Path]:
        """Files that a bucket stores besides checkpoints, in the order of sending."""
        return [
            self.plan_file, self.config_file, self.environment_file, self.changes_file, self.launch_file,
            self.records_file, self.system_file, self.mirror_file("mlflow"), self.mirror_file("wandb"), *self.files,
        ]  # fmt: skip

    @property
    def variations(self) -> list[Results]:
        return [Results(path) for path in sorted(self.variation("").directory.glob("*")) if path.is_dir()]

    def config(self) -> Config:
        try:
            text = read_plain(self.config_file, LARGEST_CONFIG).decode()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.config_file} is missing or damaged ({error})") from error
        return parse_config(text, self.config_file)

    def plan(self) -> Plan:
        """Read the plan. Runs of earlier versions have no plan, but resolved values in their config."""
        if not self.plan_file.exists():
            return Plan.of_older(self.config())
        try:
            text = read_plain(self.plan_file, LARGEST_CONFIG).decode()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.plan_file} is damaged ({error})") from error
        return Plan.parse(text, self.plan_file)

    def save_plan(self, plan: Plan) -> None:
        replace_text(self.plan_file, plan.to_json())

    def save_config(self, config: Config) -> None:
        """Save the config, after the plan: a folder with a config is a run."""
        replace_text(self.config_file, to_yaml(config))

    def newest_checkpoint(self, warn: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
        if self.bucket is not None:
            from dicedist.runs import copies

            with copies.alone(self.directory):
                copies.fetch_newest(self.bucket, self, warn)
        return checkpoint.newest(self.checkpoints, warn)

    def checkpoint(self, on_warning: Callable[[str], None] = warn, which: str | None = None) -> Checkpoint:
        """Return the checkpoint to read; ValueError if there is none.

        which: last | best; None: the best if the run keeps it (checkpoint.best). on_warning: called if the last
        checkpoint is damaged and an earlier one replaces it.
        """
        reasons: list[str] = []
        found = self.newest_checkpoint(reasons.append)
        if found is None:
            raise ValueError(f"{self} has no intact checkpoint{f': {reasons[0]}' if reasons else ''}")
        if reasons:
            on_warning(f"{reasons[0]}; {found.path.name} is used instead")
        best = checkpoint.best_step(found.about)
        if which == "best" and best is None:
            raise ValueError(f"{self} keeps no best checkpoint: train with checkpoint.best=val/nll, or leave it out")
        if which == "last" or best in (None, found.step):
            return found
        try:
            return checkpoint.read(checkpoint.path_of(self.checkpoints, best))
        except ValueError as error:
            raise ValueError(f"{error}: it was the best one, checkpoint=last reads the last") from error

    def results_of(self, found: Checkpoint) -> tuple[Results, dict[str, Any]] | None:
        """Return the results of this checkpoint and of evaluate.weights, with their folder; None if there are none."""
        wanted = {"step": found.step, **origin(self.config(), found)}
        for results in (self, self.aside(found.step)):
            result = results.result()
            if result is not None and all(result.get(key, value) == value for key, value in wanted.items()):
                return results, result
        return None

    def ending(self) -> str:
        """Return how training ended, as MLflow's status. FINISHED needs an intact last checkpoint and results."""
        found = self.newest_checkpoint()
        if found is not None and found.complete:
            evaluated = checkpoint.best_step(found.about) or found.step
            if self.result(evaluated) is not None or (self.result() is None and not self.config().evaluate.test):
                return "FINISHED"
        return "KILLED" if self.stopped_file.exists() else "FAILED"

    def exported(self, name: str) -> Path:
        """Return the default path of a file that `export` writes."""
        return self.directory / name

    def variation(self, label: str) -> Results:
        """Return the results of a part of the run: some members, another average, an earlier step."""
        return Results(own_folder(own_folder(self.directory / "evaluations") / label))

    def aside(self, step: int | str) -> Results:
        return self.variation(f"step-{step}")

    def set_results_aside(self) -> None:
        """Move the results to a folder of their step, because the run continues or is evaluated differently.

        evaluation.json is moved last, so that a start after a crash moves the rest.
        """
        found = self.result()
        if found is None:
            return
        label = found.get("step", "before")
        places = (self.aside(label if nth == 1 else f"{label}-{nth}") for nth in itertools.count(1))
        free = next(place for place in places if not place.result_file.exists())
        free.directory.mkdir(parents=True, exist_ok=True)
        for old, new in zip(self.files, free.files, strict=True):
            if old.exists():
                old.rename(new)

    def validations(self, name: str) -> list[tuple[float, float]]:
        """Return epochs and validation values of a measure, named without val/."""
        records, key = whole_records(self.records_file), f"val/{name}"
        return [(record["epoch"], record[key]) for record in records if record.get(key) is not None]

    def last_validation(self, name: str) -> float | None:
        """Return the last validation value of a measure; None if there is none."""
        known = self.validations(name)
        return known[-1][1] if known else None


def is_url(place: str | Path) -> bool:
    return isinstance(place, str) and "://" in place


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, which may be missing or still growing."""
    if not path.exists():
        return []
    text = read_plain(path, LARGEST_RECORDS).decode()
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def whole_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]
