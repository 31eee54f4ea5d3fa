"""Draw runs: one self-contained page with tables and figures of their records.

python -m dicedist.report runs/A runs/B ...                        writes report.html
python -m dicedist.report runs/A runs/B ... output=FILE.html
"""

from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command

OUTPUT = "output="


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    runs = [argument for argument in arguments if not argument.startswith(OUTPUT)]
    outputs = [argument.removeprefix(OUTPUT) for argument in arguments if argument.startswith(OUTPUT)]
    if not runs:
        raise ValueError("name the runs to report: python -m dicedist.report runs/A runs/B ... [output=report.html]")
    from dicedist.reporting.page import write_report  # not above: torch takes seconds, which help need not
    from dicedist.runs.run import Run

    output = Path(outputs[-1] if outputs else "report.html")
    write_report([Run.open(directory) for directory in runs], output)
    print(f"wrote {output} ({output.stat().st_size / 1000:,.0f} kB)")


if __name__ == "__main__":
    command(run)
