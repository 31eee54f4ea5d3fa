"""Train every combination of some values, one process group each.

Examples:
    launch/sweep redundancy.delta=0.1,0.2,0.4 seed=0,1,2                  nine trainings
    launch/sweep --name tryout --nproc 5 method=ind,dice data=shapes network=resnet8 epochs=5
    launch/sweep --at-once 2 seed=range(0,8)                              two at a time

Stopped at any time, the same command continues: finished runs are skipped. A run that fails does not end the sweep.
"""

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dicedist.cluster.process import command
from dicedist.config.literal import split_values
from dicedist.console.lines import plural, say
from dicedist.console.tables import table
from dicedist.reporting.page import write_report
from dicedist.runs.jobs import Job, num_devices, ranks_for
from dicedist.runs.queue import Queue

RANGE = re.compile(r"range\((-?\d+(?:,-?\d+){0,2})\)")
UNFIT = re.compile(r"[^\w.+-]+")  # for the name of a folder


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    directory = Path(options.dir) / options.name
    swept, jobs = combinations(options.overrides, directory, options.name)
    if not jobs:
        raise ValueError("a range without a number gives no run: write range(0,3) for 0, 1 and 2")
    most = max(ranks_for(job.config) for job in jobs)  # reads every config: a misspelt key ends it before the first job
    ranks = options.nproc or most
    at_once = options.at_once or max(1, num_devices() // ranks)
    directory.mkdir(parents=True, exist_ok=True)
    say(
        f"{plural(len(jobs), 'run')} in {directory}, {ranks} process{'es' * (ranks > 1)} each, "
        f"{min(at_once, len(jobs))} at once"
    )
    if finished_before := sum(job.result is not None for job in jobs):
        say(f"{finished_before} finished before")
    try:
        failed = Queue(jobs, ranks, at_once, directory).run()
    finally:
        say(f"\n{results(swept, jobs)}")
    finished = [job.run for job in jobs if job.result is not None]
    if finished:
        write_report(finished, directory / "report.html")
        say(f"figures: {directory / 'report.html'}")
    if failed:
        raise ValueError(
            f"failed: {', '.join(failed)} (logs in {directory}); the same command tries again, "
            "another --name begins anew"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "dicedist sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
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
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key, given, text = override.partition("=")
        if not (key and given):
            raise ValueError(f"{override}: write key=value or key=value,value")
        numbers = RANGE.fullmatch(text)
        choices[key] = [*map(str, range(*map(int, numbers[1].split(","))))] if numbers else split_values(text)
    swept = [key for key, values in choices.items() if len(values) > 1]
    common = (f"run.dir={directory}", f"tracking.experiment={experiment}")
    jobs = []
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{UNFIT.sub('-', chosen[key]).strip('-')}" for key in swept) or "run"
        pairs = (f"{key}={value}" for key, value in chosen.items())
        jobs.append(Job(name, (*pairs, *common, f"run.name={name}")))
    return swept, jobs


def results(swept: Sequence[str], jobs: Sequence[Job]) -> str:
    rows: list[list[Any]] = []
    for job in jobs:
        values = dict(override.split("=", 1) for override in job.overrides)
        result = job.result
        figures: list[Any] = ["-"] * 6
        if result is not None:
            valid = job.run.last_validation("ensemble/accuracy")
            members = fmean(member["accuracy"] for member in result["members"]["per_member"])
            ensemble, tempered = result["ensemble"], result["ensemble_tempered"]
            errors = result["diversity"]["ratio_error"]
            chosen_by = "-" if valid is None else 100 * valid
            figures = [chosen_by, 100 * ensemble["accuracy"], 100 * members, tempered["nll"], tempered["ece"], errors]
        rows.append([*(values[key] for key in swept), *figures])
    return table([*swept, "validation %", "test %", "members %", "nll, tempered", "ece, tempered", "ratio-error"], rows)


if __name__ == "__main__":
    command(run)
