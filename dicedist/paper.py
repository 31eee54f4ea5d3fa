"""The paper's tables, run and printed beside the paper's figures.

    launch/paper --list                                       every cell and table
    launch/paper --table cifar10                              a table, three seeds each
    launch/paper --cell cifar100/resnet32-net4-dice --seeds 0
    launch/paper --scale small                                a comparison in small, for two cores and under 2 hours
    launch/paper --table size --dir trial max_steps=100       any key of the training config

A cell is a file of conf/experiment/. Stopped at any time, the same command continues: finished runs are skipped.
"""

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence

from dicedist.cluster.process import EXIT_STOPPED, EXIT_USER, command
from dicedist.cluster.signals import Stopped
from dicedist.config import nearest
from dicedist.console.lines import say
from dicedist.console.tables import table
from dicedist.reporting.paper import Cell, Figure, find_cells
from dicedist.runs.jobs import Job, ranks_for

SMALL = "small"


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    cells = chosen(options, find_cells())
    if options.list:
        rows = [[cell.name, figure.table, figure.predictor, str(figure)] for cell, figure in cells]
        say(table(["cell", "table", "accuracy of", "paper"], rows))
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    overrides = (*options.overrides, f"run.dir={options.dir}")
    jobs = {cell.name: [job_of(cell, seed, overrides) for seed in seeds] for cell, _ in cells}
    every = [job for of_cell in jobs.values() for job in of_cell]
    try:
        failed = [job.name for job in every if not finish(job, options.nproc or ranks_for(job.config))]
    finally:
        say(results(cells, jobs))
    if failed:
        raise ValueError(f"failed, see above: {', '.join(failed)}; the same command tries again")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch/paper", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the cells, run none")
    parser.add_argument("--table", help="all cells of a table")
    parser.add_argument("--cell", help="a single one")
    parser.add_argument("--scale", choices=[SMALL], help=f"small: the same as --table {SMALL} --seeds 0,1")
    parser.add_argument("--seeds", help="0,1,2 unless told")
    parser.add_argument(
        "--nproc", type=int, help="processes of a run (as many as there are GPUs or cores, if it has so many parts)"
    )
    parser.add_argument("--dir", default="runs/paper", help="where the runs are kept")
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


def results(cells: Sequence[tuple[Cell, Figure]], jobs: Mapping[str, Sequence[Job]]) -> str:
    rows = []
    for cell, figure in cells:
        found = [job.result for job in jobs[cell.name]]
        accuracies = [100 * result[figure.predictor]["accuracy"] for result in found if result is not None]
        rows.append(
            [
                cell.name,
                figure.predictor,
                str(figure),
                mean_and_deviation(accuracies),
                f"{len(accuracies)} of {len(found)}",
            ]
        )
    return table(["cell", "accuracy of", "paper", "ours", "seeds"], rows)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, to the paper's two decimals."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    command(run)
