"""Draw runs: one self-contained page with tables and figures of their records.

python -m dicedist.report runs/A runs/B ...                        writes report.html
python -m dicedist.report runs/A runs/B ... output=FILE.html
"""

from collections.abc import Sequence
from pathlib import Path

from dicedist.reporting.page import page
from dicedist.reporting.records import read_groups
from dicedist.world import command

OUTPUT = "output="


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    runs = [Path(argument) for argument in arguments if not argument.startswith(OUTPUT)]
    outputs = [argument.removeprefix(OUTPUT) for argument in arguments if argument.startswith(OUTPUT)]
    output = Path(outputs[-1] if outputs else "report.html")
    write_report(runs, output)
    print(f"wrote {output} ({output.stat().st_size / 1000:,.0f} kB)")


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Whatever the runs have recorded so far; runs that differ only in their seed are pooled."""
    if not runs:
        raise ValueError("name the runs to report: python -m dicedist.report runs/A runs/B ... [output=report.html]")
    text = page(read_groups(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    command(run)
