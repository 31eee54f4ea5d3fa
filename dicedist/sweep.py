"""Train every combination of some values, one process group each, or search for the best values.

Examples:
    dicedist sweep redundancy.delta=0.1,0.2,0.4 seed=0,1,2                  nine trainings
    dicedist sweep --name tryout --nproc 5 method=ind,dice data=shapes network=resnet8 epochs=5
    dicedist sweep --at-once 2 'seed=range(0,8)'                            two at a time
    dicedist sweep search=optuna --trials 30 'redundancy.delta=interval(0.02,0.6,log)' 'optimizer.lr=choice(0.05,0.1)'
    dicedist sweep search=optuna --objective accuracy,ratio_error ...       several objectives: the Pareto front

The same command resumes after a stop, and skips finished runs. A failed run does not end the sweep. A search optimizes
validation measures, and does not use the test set until --test. Run the same command in another terminal, or on another
machine that sees the folder, to add workers to a search.
"""

import argparse
import csv
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dicedist.cluster.process import command
from dicedist.config import names
from dicedist.config.literal import split_values
from dicedist.config.options import Parser, check_counts
from dicedist.console.lines import plural, say
from dicedist.console.tables import table
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, Measure
from dicedist.reporting.page import write_report
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job, num_devices, of_one_size, ranks_for
from dicedist.runs.queue import Queue
from dicedist.runs.results import Results
from dicedist.studies.objectives import objectives_of
from dicedist.studies.outcome import conclude
from dicedist.studies.search import Plan, Search
from dicedist.studies.spaces import spaces_in

RANGE = re.compile(r"range\((-?\d+(?:,-?\d+){0,2})\)")
ACCURACY, *UNCERTAINTY = [measure for measure in ENSEMBLE if measure.quick]
COLUMNS: list[tuple[str, str, Measure]] = [  # title, part of a result, measure; values are chosen by validation
    ("validation ", "validation", ACCURACY),
    ("test ", "ensemble", ACCURACY),
    ("members' ", "members", ACCURACY),
    *(("tempered ", "ensemble_tempered", measure) for measure in UNCERTAINTY),
    *(("", "diversity", measure) for measure in DIVERSITY if measure.summary),
]
PARTS = ("validation", "ensemble", "ensemble_tempered", "members", "diversity", "uncertainty")  # for results.csv
UNFIT = re.compile(r"[^\w.+-]+")  # for the name of a folder


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    directory = Path(options.dir) / options.name
    if any(override.startswith("search=") for override in options.overrides):
        search(options, directory)
        return
    swept, jobs = combinations(options.overrides, directory, options.name)
    if not jobs:
        raise ValueError("a range without a number gives no run: write range(0,3) for 0, 1 and 2")
    # This reads every config: a misspelled key ends the sweep before the first job.
    ranks = options.nproc or max(ranks_for(job.config) for job in jobs)
    jobs, size = of_one_size(jobs, ranks)
    if size is not None:
        say(f"ensemble.size=auto would differ between these runs: {size} members in each, so that they compare")
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
        figures = directory / "results.csv"
        replace_text(figures, as_csv(swept, jobs))
    finished = [job.run for job in jobs if job.result is not None]
    if finished:
        page = Results(directory).report_file
        write_report(finished, page)
        say(f"done: {page}, {figures}")
    if failed:
        raise ValueError(
            f"failed: {', '.join(failed)} (logs in {directory}); the same command tries again, "
            "another --name starts from scratch"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dicedist sweep", __doc__)
    parser.add_argument("--name", default="sweep", help="of the folder, and of the experiment in MLflow")
    parser.add_argument("--dir", default="runs", help="parent of the folder")
    parser.add_argument("--nproc", type=int, help="of a run (one process for each part, as far as GPUs or cores go)")
    parser.add_argument("--at-once", type=int, help="runs at a time (as many as the GPUs or cores have room for)")
    parser.add_argument("--trials", type=int, default=20, help="of a search; a number larger than before adds to it")
    parser.add_argument(
        "--objective",
        default="nll",
        help="of a search: nll, ensemble_tempered/nll (after temperature), accuracy, ece, ratio_error, members/nll ...",
    )
    parser.add_argument("--no-pruning", action="store_true", help="every trial of a search runs to its end")
    parser.add_argument("--test", action="store_true", help="measure the best trial on the test set when all are done")
    parser.add_argument("overrides", nargs="+", metavar="key=value,value", help="keys of the training config")
    options = parser.parse_intermixed_args(arguments)
    check_counts(options, "nproc", "at_once", "trials")
    return options


def search(options: argparse.Namespace, directory: Path) -> None:
    """Run a search: trainings whose values are proposed from the results of earlier ones."""
    values = dict(override.partition("=")[::2] for override in options.overrides)
    if (kind := values.pop("search")) != "optuna":
        raise ValueError(f"search={kind}: write search=optuna")
    spaces, fixed = spaces_in(values)
    if not spaces:
        raise ValueError("a search needs a key to choose: write key=interval(low,high,log) or key=choice(a,b)")
    overrides = (*(f"{key}={text}" for key, text in fixed.items()), f"tracking.experiment={options.name}")
    objectives = objectives_of(options.objective)
    plan = Plan(directory, overrides, spaces, objectives, options.trials, prunes=not options.no_pruning)
    ranks = options.nproc or ranks_for(plan.check().config)
    at_once = options.at_once or max(1, num_devices() // ranks)
    searching = Search(plan, ranks, at_once)
    processes = f"{ranks} process{'es' * (ranks > 1)} each, {at_once} at once"
    say(f"{plural(options.trials, 'trial')} in {directory}, {processes}, {searching.already} ended before")
    searching.run()
    conclude(searching)
    if options.test:
        test(searching)


def test(searching: Search) -> None:
    """Evaluate the runs of the best trials on the test set."""
    trained = map(searching.job_of, searching.best())
    jobs = [Job(job.name, (*job.overrides, "evaluate.test=true")) for job in trained]
    failed = Queue(jobs, searching.ranks, 1, searching.plan.directory).run()
    if failed:
        raise ValueError(f"failed: {', '.join(failed)} (logs in {searching.plan.directory})")
    say(f"\n{results([], jobs)}")


def combinations(overrides: Sequence[str], directory: Path, experiment: str) -> tuple[list[str], list[Job]]:
    """Return the keys with several values, and a job for each combination of values, which names the job."""
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key, given, text = override.partition("=")
        if not (key and given):
            raise ValueError(f"{override}: write key=value or key=value,value")
        numbers = RANGE.fullmatch(text)
        choices[key] = [*map(str, range(*map(int, numbers[1].split(","))))] if numbers else split_values(text)
    swept = [key for key, values in choices.items() if len(values) > 1]
    common = (f"run.dir={directory}", f"tracking.experiment={experiment}", f"tracking.study={experiment}")
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
        figures: list[Any] = [None] * len(COLUMNS)
        if (found := found_by(job)) is not None:
            figures = [measure.in_unit(found[part][measure.name]) for _, part, measure in COLUMNS]
        rows.append([*(values[key] for key in swept), *figures])
    return table([*swept, *(f"{title}{measure.heading}" for title, _, measure in COLUMNS)], rows)


def found_by(job: Job) -> dict[str, Any] | None:
    """Return the results of a finished run, with its last validation as another part; None if it is not finished."""
    validated = names.record(names.ENSEMBLE, ACCURACY.name)
    result = job.result
    return None if result is None else {**result, "validation": {ACCURACY.name: job.run.last_validation(validated)}}


def as_csv(swept: Sequence[str], jobs: Sequence[Job]) -> str:
    """Return a row for each run: its name, folder and values, and every figure of the parts of its results."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        values = dict(override.split("=", 1) for override in job.overrides)
        row: dict[str, Any] = {"run": job.name, "folder": str(job.run), **{key: values[key] for key in swept}}
        if (found := found_by(job)) is not None:
            figures = ((f"{part}/{name}", value) for part in PARTS for name, value in found.get(part, {}).items())
            row |= {key: value for key, value in figures if isinstance(value, int | float)}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    command(run)
