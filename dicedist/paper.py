"""Train the cells of the paper's tables, and print our figures next to the paper's.

    launch/paper --list                                       every cell and table
    launch/paper --table cifar10                              a table, three seeds each
    launch/paper --cell cifar100/resnet32-net4-dice --seeds 0
    launch/paper --scale small                                every method at small scale, with a forecast of the hours
    launch/paper --scale small --forecast                     only the forecast
    launch/paper --table ood --csv ood.csv --page ood.html    the same as a file, and as a page
    launch/paper --table size --dir trial max_steps=100       any key of the training config

A cell is a row of conf/cells.csv. The same command resumes after a stop, and skips finished runs. Every measure in the
paper is compared, in the paper's unit. `apart` marks a figure that differs from the paper's by more than both
deviations over seeds.
"""

import argparse
import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dicedist.benchmarks.costs import device_hours
from dicedist.cluster.process import EXIT_STOPPED, EXIT_USER, command
from dicedist.cluster.signals import Stopped
from dicedist.config import compose_config, nearest
from dicedist.config.options import Parser, check_counts
from dicedist.config.plan import Plan
from dicedist.console.lines import say
from dicedist.console.tables import table
from dicedist.data import sources
from dicedist.evaluation.cost import cost
from dicedist.reporting.markup import apart
from dicedist.reporting.page import write_comparison
from dicedist.reporting.paper import Figure, find_figures
from dicedist.reporting.records import Pooled, dig, pool
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job, ended_on_stop, num_devices, ranks_for

SMALL = "small"
DEVICE = "GPU" if torch.cuda.is_available() else "core"
HEAD = ("table", "cell", "measure", "paper", "ours", "seeds", "note")


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    figures = chosen(options)
    if options.list:
        rows = [[figure.cell, figure.table, figure.measure, figure.paper] for figure in figures]
        say(table(["cell", "table", "measure", "paper"], rows))
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    overrides = (*options.overrides, f"run.dir={options.dir}")
    jobs = {figure.cell: [job_of(figure.cell, seed, overrides) for seed in seeds] for figure in figures}
    every = [job for of_cell in jobs.values() for job in of_cell]
    if options.forecast or options.scale:
        say(forecast([job for job in every if job.result is None]))
    if options.forecast:
        return
    try:
        failed = [job.name for job in every if not finish(job, options.nproc or ranks_for(job.config))]
    finally:
        rows = results(figures, jobs)
        say(table(HEAD, rows))
        if options.csv:
            write_csv(options.csv, HEAD, rows)
        if options.page:
            write_comparison(options.page, HEAD, rows)
    if failed:
        raise ValueError(f"failed, see above: {', '.join(failed)}; the same command tries again")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("launch/paper", __doc__)
    parser.add_argument("--list", action="store_true", help="show the cells, run none")
    parser.add_argument("--forecast", action="store_true", help="print the hours that the runs take here, run none")
    parser.add_argument("--table", help="all cells of a table")
    parser.add_argument("--cell", help="a single cell")
    parser.add_argument("--scale", choices=[SMALL], help=f"small: the same as --table {SMALL} --seeds 0,1")
    parser.add_argument("--seeds", help="seeds of each cell (0,1,2)")
    parser.add_argument(
        "--nproc", type=int, help="processes of a run (as many as there are GPUs or cores, if it has so many parts)"
    )
    parser.add_argument("--dir", default="runs/paper", help="folder of the runs")
    parser.add_argument("--csv", type=Path, help="also write the table into this file")
    parser.add_argument("--page", type=Path, help="also write it as a page")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run; use another --dir then")
    options = parser.parse_args(arguments)
    options.table = options.table or options.scale
    options.seeds = options.seeds or ("0,1" if options.scale else "0,1,2")
    if not re.fullmatch(r"\d+(,\d+)*", options.seeds):
        raise ValueError(f"--seeds {options.seeds}: write 0,1,2")
    check_counts(options, "nproc")
    return options


def chosen(options: argparse.Namespace) -> list[Figure]:
    """Return the figures to compare with."""
    if not (options.cell or options.table or options.list):
        raise ValueError("write --table NAME, --cell NAME or --scale small; --list shows what there is")
    every = find_figures()
    by_cell, by_table = ({getattr(figure, name) for figure in every} for name in ("cell", "table"))
    if options.cell:
        if options.cell not in by_cell:
            near = nearest(options.cell, sorted(by_cell))
            raise ValueError(f"--cell {options.cell}: there is none{near}; --list shows them")
        return [figure for figure in every if figure.cell == options.cell]
    if options.table and options.table not in by_table:
        known = ", ".join(sorted(by_table))
        raise ValueError(f"--table {options.table}: there is none; write one of {known}")
    return [figure for figure in every if options.table in (None, figure.table)]


def job_of(cell: str, seed: int, overrides: tuple[str, ...]) -> Job:
    return Job(f"{cell} seed {seed}", (f"experiment={cell}", f"seed={seed}", *overrides))


def finish(job: Job, ranks: int) -> bool:
    """Start or resume a run unless it is finished. Return whether it is finished now."""
    if job.result is not None:
        return True
    say(f"\n== {job.name} on {ranks} process{'es' if ranks > 1 else ''}")
    process = job.start(ranks)
    with ended_on_stop(lambda: [process]):
        code = process.wait()
    if code == EXIT_STOPPED:
        raise Stopped
    if code == EXIT_USER:
        raise ValueError(f"{job.name} was refused, see above")
    return code == 0 and job.result is not None


def needs(figure: Figure, num_results: int) -> str:
    """Return what is missing to compute our figure."""
    if not num_results:
        return "needs a run"
    group, _, rest = figure.measure.partition(".")
    return f"needs the OOD set {rest.partition('.')[0]}" if group == "ood" else "needs an evaluation by this version"


def forecast(jobs: Sequence[Job]) -> str:
    """Return a forecast of the runs' hours on the cores of this machine, from a few steps of each experiment."""
    if not jobs:
        return "all runs are finished"
    runs = Counter(job.name.partition(" seed ")[0] for job in jobs)
    configs = {job.name.partition(" seed ")[0]: job.config for job in jobs}
    data = {name: (config.data.name, config.data.train_limit, config.data.split) for name, config in configs.items()}
    loaded = {key: sources.load(configs[name].data) for key, name in {data[name]: name for name in configs}.items()}
    hours = {name: device_hours(config, loaded[data[name]]) for name, config in configs.items()}
    rows = [[name, str(count), f"{hours[name]:.2f}", f"{count * hours[name]:.2f}"] for name, count in runs.items()]
    devices, total = num_devices(), sum(count * hours[name] for name, count in runs.items())
    shown = table(["experiment", "runs to go", f"hours of a {DEVICE} each", "together"], rows)
    alone = f"{total / devices:.1f} hours if all {devices} here have nothing else to do"
    return f"{shown}\nabout {total:.1f} hours of a {DEVICE}: {alone}"


def results(figures: Sequence[Figure], jobs: Mapping[str, Sequence[Job]]) -> list[list[str]]:
    rows = []
    for figure in figures:
        found = [job.result for job in jobs[figure.cell]]
        values = measured(figure, [result for result in found if result is not None])
        ours = pool([value / figure.unit for value in values])
        is_apart = ours is not None and figure.pooled is not None and apart(ours, figure.pooled)
        seeds = f"{len(values)} of {len(found)}"
        known = sum(result is not None for result in found)
        note = "apart" if is_apart else "" if values else needs(figure, known)
        rows.append([figure.table, figure.cell, figure.measure, figure.paper, mean_and_deviation(ours), seeds, note])
    return rows


def measured(figure: Figure, results: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the measure of every result that has it. The cost of an ensemble needs no run."""
    group, _, rest = figure.measure.partition(".")
    if group == "cost":
        return [costs_of(figure.cell)[rest]]
    values = [dig(result, figure.measure.split(".")) for result in results]
    return [value for value in values if value is not None]


@cache
def costs_of(cell: str) -> dict[str, float]:
    config = compose_config([f"experiment={cell}"])
    assert isinstance(config.ensemble.size, int)
    plan = Plan.of(config, config.ensemble.size, config.data.image_shape)
    return cost(config, plan, num_classes=100 if config.data.name == "cifar100" else 10)


def mean_and_deviation(ours: Pooled | None) -> str:
    """Format mean and deviation with two decimals, as the paper does."""
    if ours is None:
        return "-"
    return f"{ours.mean:.2f}" + (f" +- {ours.deviation:.2f}" if ours.deviation is not None else "")


def write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text.getvalue())


if __name__ == "__main__":
    command(run)
