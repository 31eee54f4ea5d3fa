"""Read the records of runs from their folders, and pool runs that differ only in the seed."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from dicedist.config import Config, Scope, flatten, names
from dicedist.config.compose import scope_of
from dicedist.config.plan import Plan
from dicedist.reporting.labels import ORDER, Settings, labels
from dicedist.reporting.svg import NUM_STYLES
from dicedist.runs.files import read_json, read_plain
from dicedist.runs.results import is_named
from dicedist.runs.run import LARGEST_RECORDS, Run

SHOWN_OTHERWISE = ("method.", "structure", "ensemble.size", "redundancy.delta")  # see `settings`
MEASURED = {
    "member_ids", "ensemble", "ensemble_tempered", "members", "diversity", "accuracy_by_size", "reliability",
    "per_class",
}  # fmt: skip
OWN = ("folder", "files", "shards", "arrays", "vectors", "own")  # data sets that need more than a name
LONGEST_CURVE = 200
COLORS = {"ind": 0, "ceb": 1, "dice": 2, "cebr": 3, "adp": 4, "ce_cr": 5, "ib": 6, "ibr": 7}


@dataclass(frozen=True)
class Recorded:
    """The records and results of one run."""

    run: Run
    config: Config  # with resolved values
    plan: Plan
    records: list[dict[str, Any]]  # the lines of metrics.jsonl
    evaluation: dict[str, Any]  # empty if there is none yet
    gallery: dict[str, np.ndarray]

    @property
    def missing(self) -> list[str]:
        """The missing results of this run, and how to produce them."""
        notes = []
        if not self.records:
            notes.append("no records of training")
        elif not self.finished:
            notes.append(f"stopped at epoch {self.records[-1]['epoch']:g} of {self.config.epochs}")
        validated = names.validation(names.ENSEMBLE, names.ACCURACY)
        if not any(validated in record for record in self.records):
            notes.append("no validation" + (" (data.split=full)" if self.config.data.split == "full" else ""))
        if not self.evaluation:
            notes.append(f"not evaluated: python -m dicedist.evaluate run={self.run}")
        if self.sets_not_found:
            notes.append(f"OOD sets not found: {', '.join(self.sets_not_found)}")
        return notes

    @property
    def sets_not_found(self) -> list[str]:
        """Names of the OOD sets that were not found. Each line of `ood_missing` begins with one."""
        return [line.partition(":")[0] for line in self.evaluation.get("ood_missing", [])]

    @property
    def finished(self) -> bool:
        last = self.records[-1]
        return last["epoch"] >= self.config.epochs or last["step"] >= (self.config.max_steps or math.inf)

    @cached_property
    def settings(self) -> Settings:
        """All settings that can change a result, except the seed."""
        config, evaluation, size = self.config, self.evaluation, self.plan.num_members
        compares = "redundancy" in config.method.terms
        ignored = SHOWN_OTHERWISE if compares else (*SHOWN_OTHERWISE, "redundancy.")
        compared = {key: value for key, value in flatten(config).items() if not key.startswith(ignored)}
        return {
            **{key: value for key, value in compared.items() if scope_of(key) in (Scope.RESULT, Scope.LENGTH)},
            **({"redundancy.delta": config.redundancy.delta_for(size)} if compares else {}),
            "data.name": f"{config.data.name} {config.data.root}" if config.data.name in OWN else config.data.name,
            "network.name": config.network.label,
            "method.name": config.method.name,
            "method.title": config.method.label,
            "method.meaning": config.method.meaning or f"terms {json.dumps(config.method.terms)}",
            "terms": json.dumps(config.method.terms),
            "ensemble": f"{size}-{config.structure}" + (f" x {config.samples}" if config.samples > 1 else ""),
            "average": evaluation.get("average", config.evaluate.average),
            "members": evaluation.get("member_ids", list(range(self.plan.num_predictors))),
        }


@dataclass(frozen=True)
class Pooled:
    mean: float
    deviation: float | None  # sample deviation, with n - 1; None for a single run
    n: int
    values: tuple[float, ...] = ()  # one per run, in the order of seeds; empty for published figures

    def times(self, scale: float) -> "Pooled":
        deviation = None if self.deviation is None else scale * self.deviation
        return Pooled(scale * self.mean, deviation, self.n, tuple(scale * value for value in self.values))


@dataclass(frozen=True)
class Point:
    x: float
    y: Pooled


@dataclass(frozen=True)
class Group:
    """Runs of the same ensemble with different seeds."""

    label: str
    style: int  # its color and marker in every figure
    runs: list[Recorded]

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [run.evaluation for run in self.runs if run.evaluation]

    def pooled(self, read: Callable[[dict[str, Any]], float | None]) -> Pooled | None:
        """Pool one number of evaluation.json over the runs that have it."""
        return pool(map(read, self.evaluations))

    def measure(self, *path: str | int) -> Pooled | None:
        return self.pooled(lambda evaluation: dig(evaluation, path))

    def curve(self, name: str, scale: float = 1) -> list[Point]:
        """Return a measure of metrics.jsonl over epochs, pooled at each step over the runs that have it."""
        by_step: dict[int, list[float]] = {}
        epochs: dict[int, float] = {}
        for record in (record for run in self.runs for record in run.records):
            value = record.get(name)
            if value is not None and math.isfinite(value):
                by_step.setdefault(record["step"], []).append(scale * value)
                epochs[record["step"]] = record["epoch"]
        pooled = ((epochs[step], pool(by_step[step])) for step in sorted(by_step))
        return thinned([Point(epoch, y) for epoch, y in pooled if y is not None])


def read_groups(runs: Sequence[Run]) -> list[Group]:
    """Return the pooled runs, sorted by data set, then in the paper's order of methods, then by delta."""
    distinct = {run.directory.resolve(): run for run in runs}
    by_settings: dict[str, list[Recorded]] = {}
    for recorded in map(read_run, distinct.values()):
        by_settings.setdefault(json.dumps(recorded.settings, sort_keys=True), []).append(recorded)
    pooled = sorted(by_settings.values(), key=lambda group: rank(group[0].settings))
    titles = labels([group[0].settings for group in pooled])
    styles = styles_of([group[0].settings["method.name"] for group in pooled])
    return [
        Group(label, style, sorted(group, key=lambda recorded: recorded.config.seed))
        for label, style, group in zip(titles, styles, pooled, strict=True)
    ]


def styles_of(methods: Sequence[str]) -> list[int]:
    """Return a style for each method. A method has the same color on every page; equal colors differ in the marker."""
    colors = [COLORS.get(method, crc32(method.encode()) % NUM_STYLES) for method in methods]
    return [color + NUM_STYLES * colors[:place].count(color) for place, color in enumerate(colors)]


def rank(settings: Settings) -> tuple[str, int, str, float]:
    name = settings["method.name"]
    place = ORDER.index(name) if name in ORDER else len(ORDER)
    return settings["data.name"], place, name, settings.get("redundancy.delta", 0.0)


def read_run(run: Run) -> Recorded:
    try:
        plan = run.plan()
        config = plan.resolve(run.config())
    except ValueError as error:
        raise ValueError(f"{run} is not a run of this version: {error}") from error
    records, evaluation = read_records(run.records_file), read_evaluation(run)
    return Recorded(run, config, plan, records, evaluation, read_gallery(run, evaluation))


def read_records(path: Path) -> list[dict[str, Any]]:
    lines = read_plain(path, LARGEST_RECORDS).decode(errors="replace").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({"step": int(record["step"]), "epoch": float(record["epoch"]), **record})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break  # the last line may be cut off by a crash, or incomplete
            raise ValueError(f"{path} is damaged at line {number}: delete that line to report the others") from error
    return records


def read_evaluation(run: Run) -> dict[str, Any]:
    path = run.result_file
    if not path.exists():
        return {}
    again = f"python -m dicedist.evaluate run={run} writes it again"
    try:
        evaluation = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {again}") from error
    if not MEASURED <= evaluation.keys():
        raise ValueError(f"{path} is not an evaluation of this version: {again}")
    return evaluation


def read_gallery(run: Run, evaluation: dict[str, Any]) -> dict[str, np.ndarray]:
    path = run.gallery_file
    if not path.is_file() or not is_named(evaluation, path):
        return {}
    return {name: tensor.numpy() for name, tensor in run.tensors(path, evaluation).items()}


def distinct(names: Iterable[str]) -> list[str]:
    """Return the names without repetitions, in the order of their first appearance."""
    return list(dict.fromkeys(names))


def dig(values: Any, path: Iterable[str | int]) -> float | None:
    """Return the number at the end of the path; None if the path does not exist."""
    for key in path:
        if isinstance(values, list) and isinstance(key, int):
            values = values[key]
            continue
        if not isinstance(values, dict):
            return None
        values = values.get(key)
    return values


def pool(values: Iterable[float | None]) -> Pooled | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Pooled(statistics.fmean(known), deviation, len(known), tuple(known))


def thinned(points: list[Point]) -> list[Point]:
    """Average neighboring points if there are more than a figure can show."""
    size = math.ceil(len(points) / LONGEST_CURVE) or 1
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        Point(
            statistics.fmean(point.x for point in chunk),
            Pooled(
                statistics.fmean(point.y.mean for point in chunk),
                None if chunk[0].y.deviation is None else statistics.fmean(point.y.deviation or 0 for point in chunk),
                chunk[0].y.n,
            ),
        )
        for chunk in chunks
    ]
