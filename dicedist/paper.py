"""The paper's tables, run and printed beside the paper's figures.

    launch/paper --list                                       every cell and table
    launch/paper --table cifar10                              a table, three seeds each
    launch/paper --cell cifar100/resnet32-net4-dice --seeds 0
    launch/paper --scale small                                a comparison in small, for two cores and under 2 hours
    launch/paper --table ood --csv ood.csv --page ood.html    the same as a file, and as a page
    launch/paper --table size --dir trial max_steps=100       any key of the training config

A cell is a file of conf/experiment/. Stopped at any time, the same command continues: finished runs are skipped. Every
measure that the paper prints is compared, in its unit; `apart` marks ours where it differs from the paper's by more
than both deviations over seeds.
"""

import argparse
import csv
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dicedist.cluster.process import EXIT_STOPPED, EXIT_USER, command
from dicedist.cluster.signals import Stopped
from dicedist.config import compose_config, nearest
from dicedist.config.options import Parser
from dicedist.console.lines import say
from dicedist.console.tables import table
from dicedist.evaluation.cost import cost
from dicedist.reporting.markup import apart
from dicedist.reporting.page import write_comparison
from dicedist.reporting.paper import Cell, Figure, find_cells
from dicedist.reporting.records import Pooled, dig, pool
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job, ranks_for

SMALL = "small"
HEAD = ("table", "cell", "measure", "paper", "ours", "seeds", "note")


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    cells = chosen(options, find_cells())
    if options.list:
        rows = [[cell.name, figure.table, figure.measure, str(figure), needs(cell)] for cell, figure in cells]
        say(table(["cell", "table", "measure", "paper", "needs"], rows))
        return
    comparable = [(cell, figure) for cell, figure in cells if not cell.missing]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    overrides = (*options.overrides, f"run.dir={options.dir}")
    jobs = {cell.name: [job_of(cell, seed, overrides) for seed in seeds] for cell, _ in comparable}
    every = [job for of_cell in jobs.values() for job in of_cell]
    try:
        failed = [job.name for job in every if not finish(job, options.nproc or ranks_for(job.config))]
    finally:
        rows = results(cells, jobs)
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
    parser.add_argument("--table", help="all cells of a table")
    parser.add_argument("--cell", help="a single one")
    parser.add_argument("--scale", choices=[SMALL], help=f"small: the same as --table {SMALL} --seeds 0,1")
    parser.add_argument("--seeds", help="0,1,2 unless told")
    parser.add_argument(
        "--nproc", type=int, help="processes of a run (as many as there are GPUs or cores, if it has so many parts)"
    )
    parser.add_argument("--dir", default="runs/paper", help="where the runs are kept")
    parser.add_argument("--csv", type=Path, help="also write the table into this file")
    parser.add_argument("--page", type=Path, help="also write it as a page")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run; use another --dir then")
    options = parser.parse_args(arguments)
    options.table = options.table or options.scale
    options.seeds = options.seeds or ("0,1" if options.scale else "0,1,2")
    if not re.fullmatch(r"\d+(,\d+)*", options.seeds):
        raise ValueError(f"--seeds {options.seeds}: write 0,1,2")
    if options.nproc is not None and options.nproc < 1:
        raise ValueError(f"--nproc {options.nproc}: write a number above 0")
    return options


def chosen(options: argparse.Namespace, cells: Sequence[Cell]) -> list[tuple[Cell, Figure]]:
    """Cells with the figure to compare with."""
    every = [(cell, figure) for cell in cells for figure in cell.figures]
    if options.cell:
        found = [(cell, figure) for cell, figure in every if cell.name == options.cell]
        names = [cell.name for cell in cells]
        if not found:
            raise ValueError(f"--cell {options.cell}: there is none{nearest(options.cell, names)}; --list shows them")
        return found
    if options.table:
        found = [(cell, figure) for cell, figure in every if figure.table == options.table]
        if not found:
            known = ", ".join(sorted({figure.table for _, figure in every}))
            raise ValueError(f"--table {options.table}: there is none; write one of {known}")
        return found
    if not options.list:
        raise ValueError("write --table NAME, --cell NAME or --scale small; --list shows what there is")
    return every


def job_of(cell: Cell, seed: int, overrides: tuple[str, ...]) -> Job:
    return Job(f"{cell.name} seed {seed}", (f"experiment={cell.name}", f"seed={seed}", *overrides))


def finish(job: Job, ranks: int) -> bool:
    """Start or continue a run unless it is finished; whether it is now."""
    if job.result is not None:
        return True
    say(f"\n== {job.name} on {ranks} process{'es' if ranks > 1 else ''}")
    process = job.start(ranks)
    try:
        code = process.wait()
    except Stopped:
        process.terminate()
        process.wait()
        raise
    if code == EXIT_STOPPED:
        raise Stopped
    if code == EXIT_USER:
        raise ValueError(f"{job.name} was refused, see above")
    return code == 0 and job.result is not None


def needs(cell: Cell) -> str:
    return "a method that is not here" if cell.missing else ""


def results(cells: Sequence[tuple[Cell, Figure]], jobs: Mapping[str, Sequence[Job]]) -> list[list[str]]:
    rows = []
    for cell, figure in cells:
        found = [job.result for job in jobs.get(cell.name, [])]
        values = measured(cell, figure, [result for result in found if result is not None])
        ours = pool([value / figure.unit for value in values])
        is_apart = ours is not None and figure.pooled is not None and apart(ours, figure.pooled)
        seeds = f"{len(values)} of {len(found)}" if found else ""
        note = "apart" if is_apart else needs(cell)
        rows.append([figure.table, cell.name, figure.measure, str(figure), mean_and_deviation(ours), seeds, note])
    return rows


def measured(cell: Cell, figure: Figure, results: Sequence[Mapping[str, Any]]) -> list[float]:
    """The measure in every result that has it; what an ensemble costs needs no run."""
    group, _, rest = figure.measure.partition(".")
    if group == "cost":
        return [costs_of(cell.name)[rest]]
    values = [dig(result, figure.measure.split(".")) for result in results]
    return [value for value in values if value is not None]


@cache
def costs_of(cell: str) -> dict[str, float]:
    config = compose_config([f"experiment={cell}"])
    return cost(config, num_classes=100 if config.data.name == "cifar100" else 10)


def mean_and_deviation(ours: Pooled | None) -> str:
    """Written with the paper's two decimals."""
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
