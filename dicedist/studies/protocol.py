"""The protocol of a comparison: a file of conf/evidence/, committed before the test set is read.

title: Digits, four MLPs
setting: {data: digits, ensemble.size: 4, epochs: 30}           keys of every run
baseline: ind                                                   the method that all others are compared with
search: {trials: 12, objective: nll, seed: 1000}                the same number of trials for every method, or 0
seeds: 20                                                       of the best config of each method: 0 to 19
methods:
  ind: {optimizer.lr: "interval(0.01,0.3,log)"}                 search spaces; plain values are fixed
  dice_one: {method: dice, redundancy.scale: one, ...}          an entry may carry another name than its method
curves: {dice: {redundancy.delta: [0, 0.1, 0.4]}}               one key of a method's best config at other values ...
curve_seeds: 5                                                  ... for the trade-off of diversity and accuracy
member_accuracy: 0.55                                           at which curves are compared; else the baseline's on val
shift: {shift: corruptions, shift_severities: [1, 3, 5]}        keys of dicedist evaluate, for the runs of the seeds
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dicedist.config import compose_request, nearest
from dicedist.config.compose import CONF
from dicedist.config.requests import EvaluateRequest
from dicedist.runs.jobs import Job, ShiftJob
from dicedist.studies.objectives import Objective, objectives_of
from dicedist.studies.search import Plan
from dicedist.studies.spaces import spaces_in

REQUIRED = ("title", "setting", "baseline", "search", "seeds", "methods")
OPTIONAL = ("curves", "curve_seeds", "member_accuracy", "question", "shift")
UNREAD = "evaluate.test=false"


@dataclass(frozen=True)
class Protocol:
    path: Path
    text: str
    title: str
    question: str
    setting: Mapping[str, str]
    methods: Mapping[str, Mapping[str, str]]
    baseline: str
    trials: int
    objective: Objective
    search_seed: int
    seeds: int
    curves: Mapping[str, tuple[str, tuple[str, ...]]]  # method -> a key and its values
    curve_seeds: int
    member_accuracy: float | None
    shift: Mapping[str, str]

    def plan(self, method: str, directory: Path) -> Plan:
        """Return the search of a method. All trials use the seed of the search."""
        spaces, fixed = spaces_in(self.methods[method])
        overrides = {**self.common(method), **fixed, "seed": str(self.search_seed)}
        folder = directory / "search" / method
        return Plan(
            folder, written(overrides), spaces, (self.objective,), self.trials, self.search_seed, study=self.path.stem
        )

    def common(self, method: str) -> dict[str, str]:
        """Return the keys of a method's runs. Validation reads all held-out inputs, unless the setting limits them."""
        return {"method": method, "tracking": "none", "data.val_limit": "null", **self.setting}

    def job(
        self, method: str, best: Mapping[str, str], seed: int, directory: Path, change: tuple[str, str] | None = None
    ) -> Job:
        """Return a run of a method's best config, or with one other value, without the test set."""
        _, fixed = spaces_in(self.methods[method])
        name = method if change is None else f"{method}-{change[0].rpartition('.')[2]}-{change[1]}"
        changed = dict([change]) if change else {}
        place = {"run.dir": str(directory / ("curves" if change else "seeds")), "run.name": f"{name}-seed{seed}"}
        place["tracking.study"] = self.path.stem
        overrides = {**self.common(method), **fixed, **best, **changed, "seed": str(seed), **place}
        return Job(f"{name}-seed{seed}", (*written(overrides), UNREAD))

    def shifted(self, job: Job) -> ShiftJob:
        """Return the evaluation of a trained run on shifted images."""
        return ShiftJob(f"{job.name}-shift", job.overrides, written({"run": str(job.run.directory), **self.shift}))

    @property
    def num_runs(self) -> dict[str, int]:
        """Return the number of trainings of each method, including its search."""
        curves = {method: len(values) * self.curve_seeds for method, (_, values) in self.curves.items()}
        return {method: self.trials + self.seeds + curves.get(method, 0) for method in self.methods}


def written(overrides: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={text}" for key, text in overrides.items())


def read_protocol(name: str) -> Protocol:
    """Read a protocol by its name in conf/evidence/, or by its path."""
    path = Path(name) if name.endswith(".yaml") else CONF / "evidence" / f"{name}.yaml"
    try:
        text = path.read_text()
    except OSError as error:
        known = sorted(found.stem for found in (CONF / "evidence").glob("*.yaml"))
        raise ValueError(f"{name}: no such protocol{nearest(name, known)}; write one of {', '.join(known)}") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: write {', '.join(REQUIRED)}")
    return checked(path, text, values)


def checked(path: Path, text: str, values: dict[str, Any]) -> Protocol:
    for key in values:
        if key not in (*REQUIRED, *OPTIONAL):
            raise ValueError(f"{path}: {key} is no part of a protocol{nearest(key, [*REQUIRED, *OPTIONAL])}")
    if missing := [key for key in REQUIRED if key not in values]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    methods = {name: texts(keys or {}) for name, keys in values["methods"].items()}
    if values["baseline"] not in methods:
        raise ValueError(f"{path}: baseline={values['baseline']} is none of its methods ({', '.join(methods)})")
    curves = {name: curve_of(path, name, keys) for name, keys in (values.get("curves") or {}).items()}
    if unknown := [name for name in curves if name not in methods]:
        raise ValueError(f"{path}: curves name {unknown[0]}, which is none of its methods ({', '.join(methods)})")
    search = values["search"]
    (objective,) = objectives_of(str(search.get("objective", "nll")))
    protocol = Protocol(
        path, text, str(values["title"]), str(values.get("question", "")), texts(values["setting"]), methods,
        values["baseline"], int(search["trials"]), objective, int(search.get("seed", 1000)), int(values["seeds"]),
        curves, int(values.get("curve_seeds", 0)), values.get("member_accuracy"), texts(values.get("shift") or {}),
    )  # fmt: skip
    if protocol.shift:
        compose_request("evaluate", written(protocol.shift), EvaluateRequest)  # refuses a misspelled key early
    for method in methods:
        plan = protocol.plan(method, Path("."))
        if protocol.trials and not plan.spaces:
            raise ValueError(f"{path}: {method} has nothing to search over, so budgets are not equal")
        if plan.spaces and not protocol.trials:
            raise ValueError(f"{path}: {method} names values to search over, and search.trials=0 allows none")
        plan.check()
    return protocol


def curve_of(path: Path, method: str, keys: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    if len(keys) != 1:
        raise ValueError(f"{path}: curves.{method} varies one key, write {{redundancy.delta: [0, 0.1]}}")
    ((key, values),) = keys.items()
    return key, tuple(text_of(value) for value in values)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: text_of(value) for key, value in values.items()}


def text_of(value: Any) -> str:
    """Return the value as text for an override."""
    return value if isinstance(value, str) else json.dumps(value)


def commit_of(path: Path) -> str:
    """Return the commit that holds the file in its present form; ValueError if there is none."""
    advice = f"{path} must be committed before the test set is read: commit it, and write the same command again"
    try:
        changed = git(path, "status", "--porcelain", "--", path.name)
        found = git(path, "log", "-1", "--format=%H", "--", path.name)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(advice) from error
    if changed or not found:
        raise ValueError(advice)
    return found


def git(path: Path, *words: str) -> str:
    command = ["git", "-C", str(path.resolve().parent), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
