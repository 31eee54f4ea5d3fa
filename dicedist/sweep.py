"""Train every combination of some values, one process group each.

Examples:
    launch/sweep redundancy.delta=0.1,0.2,0.4 seed=0,1,2                  nine trainings
    launch/sweep --name tryout --nproc 5 method=ind,dice data=shapes network=resnet8 epochs=5
    launch/sweep --at-once 2 seed=range(0,8)                              two at a time

Stopped at any time, the same command continues: finished runs are skipped. A run that fails does not end the sweep.
"""

import argparse
import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from subprocess import Popen
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from dicedist.jobs import Job, num_devices, ranks_for
from dicedist.report import write_report
from dicedist.resume import run_folder
from dicedist.signals import Stopped
from dicedist.tables import table
from dicedist.tracking import RECORDS, duration
from dicedist.world import EXIT_STOPPED, command

POLL = 0.5  # seconds
UNFIT = re.compile(r"[^\w.+-]+")  # for the name of a folder


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    directory = Path(options.dir) / options.name
    swept, jobs = combinations(options.overrides, directory, options.name)
    most = max(ranks_for(job.config) for job in jobs)  # reads every config: a misspelt key ends it before the first job
    ranks = options.nproc or most
    at_once = options.at_once or max(1, num_devices() // ranks)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} runs in {directory}, {ranks} processes each, {min(at_once, len(jobs))} at once", flush=True)
    try:
        failed = Sweep(jobs, ranks, at_once, directory).run()
    finally:
        print(f"\n{results(swept, jobs)}")
    finished = [run_folder(job.config) for job in jobs if job.result is not None]
    if finished:
        write_report(finished, directory / "report.html")
        print(f"figures: {directory / 'report.html'}")
    if failed:
        raise ValueError(f"failed: {', '.join(failed)} (logs in {directory}); the same command tries again")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch/sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="sweep", help="of the folder, and of the experiment in MLflow")
    parser.add_argument("--dir", default="runs", help="where the folder is made")
    parser.add_argument("--nproc", type=int, help="processes of a run (a part a GPU or core, as far as they go)")
    parser.add_argument("--at-once", type=int, help="runs at a time (as many as the GPUs or cores have room for)")
    parser.add_argument("overrides", nargs="+", metavar="key=value,value", help="keys of the training config")
    options = parser.parse_args(arguments)
    for name in ("nproc", "at_once"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: write a number above 0")
    return options


def combinations(overrides: Sequence[str], directory: Path, experiment: str) -> tuple[list[str], list[Job]]:
    """The keys with several values, and a job for each combination of them, named by it."""
    parser = OverridesParser.create()
    choices: dict[str, list[str]] = {}
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
        except HydraException as error:
            raise ValueError(f"{override}: write key=value or key=value,value") from error
        key, _, value = override.partition("=")
        choices[key] = list(map(str, parsed.sweep_string_iterator())) if parsed.is_sweep_override() else [value]
    swept = [key for key, values in choices.items() if len(values) > 1]
    common = (f"run.dir={directory}", f"tracking.experiment={experiment}")
    jobs = []
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{UNFIT.sub('-', chosen[key]).strip('-')}" for key in swept) or "run"
        pairs = (f"{key}={value}" for key, value in chosen.items())
        jobs.append(Job(name, (*pairs, *common, f"run.name={name}")))
    return swept, jobs


class Sweep:
    """Starts jobs as devices become free; each running job holds its own GPUs."""

    def __init__(self, jobs: Sequence[Job], ranks: int, at_once: int, directory: Path):
        self.waiting = [job for job in jobs if job.result is None]
        self.total, self.done = len(jobs), len(jobs) - len(self.waiting)
        self.ranks, self.directory = ranks, directory
        self.free = list(range(at_once))
        self.running: dict[int, tuple[Job, Popen]] = {}
        self.failed: list[str] = []
        self.started = time.monotonic()

    def run(self) -> list[str]:
        """The names of the jobs that failed."""
        already = self.done
        try:
            while self.waiting or self.running:
                while self.waiting and self.free:
                    self.start(self.waiting.pop(0), self.free.pop(0))
                for place, (job, process) in list(self.running.items()):
                    if (code := process.poll()) is not None:
                        del self.running[place]
                        self.free.append(place)
                        self.settle(job, code, already)
                time.sleep(POLL)
        except Stopped:
            for _, process in self.running.values():
                process.terminate()
            for _, process in self.running.values():
                process.wait()
            raise
        return self.failed

    def start(self, job: Job, place: int) -> None:
        gpus = gpus_of(place, self.ranks)
        with (self.directory / f"{job.name}.log").open("a") as log:
            self.running[place] = job, job.start(self.ranks, gpus, log)

    def settle(self, job: Job, code: int, already: int) -> None:
        if code == EXIT_STOPPED:
            raise Stopped
        self.done += 1
        result = job.result if code == 0 else None
        if result is None:
            self.failed.append(job.name)
        valid = validation_accuracy(job)
        outcome = f"failed: {self.reason(job)}"
        if result:
            outcome = (
                f"test {100 * result['ensemble']['accuracy']:.2f} %" if valid is None else f"validation {valid:.2f} %"
            )
        # Those that run now are about half done.
        jobs_left = len(self.waiting) + len(self.running) / 2
        left = (time.monotonic() - self.started) / (self.done - already + len(self.running) / 2) * jobs_left
        print(f"[{self.done}/{self.total}] {job.name}: {outcome}, {duration(left)} left", flush=True)

    def reason(self, job: Job) -> str:
        lines = [line for line in (self.directory / f"{job.name}.log").read_text().splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("dicedist: ") and "warning" not in line]
        return (told or lines or ["no output"])[-1].removeprefix("dicedist: ")


def gpus_of(place: int, ranks: int) -> list[int] | None:
    """The GPUs of the nth of several runs at once; None where they do not suffice to give each its own."""
    gpus = list(range(place * ranks, (place + 1) * ranks))
    return gpus if gpus[-1] < torch.cuda.device_count() else None


def validation_accuracy(job: Job) -> float | None:
    """Of the ensemble, in percent, after the last epoch: what to choose by; None without a validation split."""
    path = run_folder(job.config) / RECORDS
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line).get("val/ensemble/accuracy") for line in lines]
    known = [100 * value for value in found if value is not None]
    return known[-1] if known else None


def results(swept: Sequence[str], jobs: Sequence[Job]) -> str:
    rows: list[list[Any]] = []
    for job in jobs:
        values = dict(override.split("=", 1) for override in job.overrides)
        result = job.result
        valid = validation_accuracy(job)
        figures: list[Any] = ["-"] * 6
        if result is not None:
            members = fmean(member["accuracy"] for member in result["members"]["per_member"])
            ensemble, tempered = result["ensemble"], result["ensemble_tempered"]
            errors = result["diversity"]["ratio_error"]
            chosen_by = "-" if valid is None else valid
            figures = [chosen_by, 100 * ensemble["accuracy"], 100 * members, tempered["nll"], tempered["ece"], errors]
        rows.append([*(values[key] for key in swept), *figures])
    return table([*swept, "validation %", "test %", "members %", "nll, tempered", "ece, tempered", "ratio-error"], rows)


if __name__ == "__main__":
    command(run)
