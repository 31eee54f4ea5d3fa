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
from dataclasses import dataclass
from pathlib import Path

from dicedist.config import CONF, nearest
from dicedist.jobs import Job, ranks_for
from dicedist.signals import Stopped
from dicedist.tables import table
from dicedist.world import EXIT_STOPPED, EXIT_USER, command

# A line of a cell's head: `# paper: 77.92 +- 0.08`, of the table that is called as the cell's folder, accuracy of the
# ensemble; of another table `(size)`, of another measure `(codistillation, student)`.
FIGURE = re.compile(r"^# paper: ([\d.]+)(?: \+- ([\d.]+))?(?: \((\w+)(?:, (\w+))?\))?$", re.MULTILINE)
SMALL = "small"


@dataclass(frozen=True)
class Figure:
    table: str
    measure: str  # whose accuracy: ensemble, members (their mean), student
    value: str | None
    deviation: str | None

    def __str__(self) -> str:
        return "-" if self.value is None else self.value + (f" +- {self.deviation}" if self.deviation else "")


@dataclass(frozen=True)
class Cell:
    name: str  # folder/file
    figures: tuple[Figure, ...]


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    cells = chosen(options, find_cells())
    if options.list:
        rows = [[cell.name, figure.table, figure.measure, str(figure)] for cell, figure in cells]
        print(table(["cell", "table", "accuracy of", "paper"], rows))
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    overrides = (*options.overrides, f"run.dir={options.dir}")
    jobs = {cell.name: [job_of(cell, seed, overrides) for seed in seeds] for cell, _ in cells}
    every = [job for of_cell in jobs.values() for job in of_cell]
    try:
        failed = [job.name for job in every if not finish(job, options.nproc or ranks_for(job.config))]
    finally:
        print(results(cells, jobs))
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


def find_cells() -> list[Cell]:
    folder = CONF / "experiment"
    return [read_cell(path, str(path.relative_to(folder).with_suffix(""))) for path in sorted(folder.glob("*/*.yaml"))]


def read_cell(path: Path, name: str) -> Cell:
    """A cell without any figure is of the table that is called as its folder."""
    lines = FIGURE.findall(path.read_text()) or [("", "", "", "")]
    return Cell(
        name,
        tuple(
            Figure(where or path.parent.name, measure or "ensemble", value or None, deviation or None)
            for value, deviation, where, measure in lines
        ),
    )


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
    print(f"\n== {job.name} on {ranks} process{'es' if ranks > 1 else ''}", flush=True)
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
        accuracies = [100 * result[figure.measure]["accuracy"] for result in found if result is not None]
        rows.append([cell.name, figure.measure, str(figure), spread(accuracies), f"{len(accuracies)} of {len(found)}"])
    return table(["cell", "accuracy of", "paper", "ours", "seeds"], rows)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, to the paper's two decimals."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    command(run)
