"""Plain text tables for a terminal."""

from collections.abc import Sequence

from dicedist.console.lines import printable


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a table. Columns are as wide as their longest cell; numbers are right-aligned."""
    cells = [[text(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def text(cell: object) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return printable(str(cell))
    return f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e9 else f"{cell:.4g}"  # not 2.232e+04
