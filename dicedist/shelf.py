"""Files between nodes that share no folder, through the store of the group.

Rank 0 keeps the folder of a run. A rank that does not see it leaves the files of its parts on the shelf, and finds on
it the files that it continues from.
"""

from pathlib import Path
from typing import Any

PIECE = 2**22  # bytes: a store takes values of 8 MiB at most


class Shelf:
    """store: a connection of its own, as `take` waits for what is not there yet."""

    def __init__(self, store: Any):
        self.store = store

    def put(self, path: Path) -> None:
        """Under the file's name; what was there goes."""
        data = path.read_bytes()
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
        for nth, piece in enumerate(pieces):
            self.store.set(key(path.name, nth), piece)
        self.store.set(key(path.name), str(len(pieces)))

    def take(self, path: Path, keep: bool = False) -> None:
        """The file that was put under this name; keep: others take it too."""
        count = int(self.store.get(key(path.name)))
        with path.open("wb") as file:
            for nth in range(count):
                file.write(self.store.get(key(path.name, nth)))
        if not keep:
            for taken in [key(path.name), *(key(path.name, nth) for nth in range(count))]:
                self.store.delete_key(taken)


def key(name: str, nth: int | None = None) -> str:
    return f"shelf/{name}" if nth is None else f"shelf/{name}/{nth}"
