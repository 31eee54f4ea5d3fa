"""Print all tables of the results of runs: the summary at the end of a training, and everything else.

Examples:
    dicedist show runs/A
    dicedist show runs/A runs/B
"""

from collections.abc import Sequence

from dicedist.cluster.process import command
from dicedist.console.lines import say


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    if unknown := [argument for argument in arguments if argument.startswith("-")]:
        raise ValueError(f"{unknown[0]}: there is no such option; write the folders of runs")
    if not arguments:
        raise ValueError("name the runs to show: dicedist show runs/A")
    from dicedist.evaluation.tables import main_numbers, show  # not above: importing torch takes seconds
    from dicedist.runs.run import Run

    for one in [one for name in arguments for one in Run.open_all(name)]:
        result = one.result()
        if result is None:
            raise ValueError(f"{one} has no results: train it to the end, or write dicedist evaluate run={one}")
        say(f"{one}, step {result['step']}\n{main_numbers(result)}\n\n{show(result)}\n")


if __name__ == "__main__":
    command(run)
