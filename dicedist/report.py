"""Write a report of runs: one self-contained page with tables and figures.

python -m dicedist.report runs/A runs/B ...                        writes report.html, or report-2.html if it exists
python -m dicedist.report runs/A runs/B ... output=FILE.html
python -m dicedist.report --fresh runs/A runs/B ...                with comparable redundancies of all runs

--fresh trains a new estimator on the features of each run that has none yet. This takes minutes, and needs the data.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command
from dicedist.config import compose_request
from dicedist.config.requests import EvaluateRequest
from dicedist.console.lines import say

OUTPUT, FRESH = "output=", "--fresh"


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    runs = [argument for argument in arguments if not argument.startswith((OUTPUT, "--"))]
    if unknown := [argument for argument in arguments if argument.startswith("--") and argument != FRESH]:
        raise ValueError(f"{unknown[0]}: there is no such option; write {FRESH}, or leave it out")
    outputs = [argument.removeprefix(OUTPUT) for argument in arguments if argument.startswith(OUTPUT)]
    if not runs:
        raise ValueError("name the runs to report: python -m dicedist.report runs/A runs/B ... [output=report.html]")
    from dicedist.evaluation.saved import evaluate_run  # not above: importing torch takes seconds
    from dicedist.reporting.page import write_report
    from dicedist.runs.results import Results
    from dicedist.runs.run import Run

    output = Path(outputs[-1]) if outputs else unused(Results(".").report_file)
    opened = [one for name in runs for one in Run.open_all(name)]
    for one in opened if FRESH in arguments else ():
        if "redundancy_fresh" not in (one.result() or {}):
            say(f"{one}: estimating its redundancy by a fresh estimator ...")
            evaluate_run(one, compose_request("evaluate", [f"run={one}", "estimator=fresh"], EvaluateRequest))
    write_report(opened, output)
    print(f"wrote {output} ({output.stat().st_size / 1000:,.0f} kB)")


def unused(path: Path) -> Path:
    """Return a path that does not exist yet: report.html, report-2.html, ..."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2)))
    return next(one for one in names if not one.exists())


if __name__ == "__main__":
    command(run)
