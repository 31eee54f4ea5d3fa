"""List cached images and old checkpoints with their sizes, and with --yes delete them.

Examples:
    python -m dicedist.clean                            only list
    python -m dicedist.clean --yes data                 images decoded from files, runs copied from a bucket
    python -m dicedist.clean --yes checkpoints runs/    checkpoints before the newest intact one of each run
"""

from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command

KINDS = ("data", "checkpoints")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    words = [word for word in arguments if word != "--yes"]
    kinds = [word for word in words if word in KINDS] or [*KINDS]
    folders = [Path(word) for word in words if word not in KINDS] or [Path("runs")]
    if (lost := next((folder for folder in folders if not folder.is_dir()), None)) and lost != Path("runs"):
        raise ValueError(f"{lost}: write {' or '.join(KINDS)}, or a folder that holds runs")
    from dicedist.console.tables import table  # not above: importing torch takes seconds
    from dicedist.runs.cleaning import find_removable

    found = list(dict.fromkeys(one for folder in folders for one in find_removable(folder) if one.kind in kinds))
    sizes = {one: one.size for one in found}
    if not found:
        print("nothing to remove")
        return
    rows = [[one.kind, f"{size / 1e6:,.1f}", str(one.path), one.why] for one, size in sizes.items()]
    print(table(["what", "MB", "where", "why it may go"], rows))
    total = f"{sum(sizes.values()) / 1e6:,.1f} MB"
    if "--yes" not in arguments:
        print(f"{total} in all; add --yes to remove it")
        return
    for one in found:
        one.remove()
    print(f"removed {total}")


if __name__ == "__main__":
    command(run)
