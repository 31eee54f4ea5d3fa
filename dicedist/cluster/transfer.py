"""Transfer files between nodes that share no folder, through the store of the group.

Rank 0 keeps the folder of a run. A rank that does not see the folder puts the files of its parts into the store. To
resume, it takes its files out of the store.
"""

from pathlib import Path

import torch.distributed as dist

from dicedist.cluster.channel import Channel

PIECE = 2**22  # bytes; a store accepts values of at most 8 MiB


class FileTransfer:
    """store: a separate connection, because `take` waits until the file is there."""

    def __init__(self, store: dist.Store | Channel):
        self.store = store

    def put(self, path: Path) -> None:
        """Store the file under its name, replacing an earlier one."""
        data = path.read_bytes()
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
        for nth, piece in enumerate(pieces):
            self.store.set(store_key(path.name, nth), piece)  # type: ignore[arg-type]  # torch takes bytes, too
        self.store.set(store_key(path.name), str(len(pieces)))

    def take(self, path: Path, keep: bool = False) -> None:
        """Write the file that was put under this name. keep: leave it in the store for others."""
        count = int(self.store.get(store_key(path.name)))
        with path.open("wb") as file:
            for nth in range(count):
                file.write(self.store.get(store_key(path.name, nth)))
        if not keep:
            for taken in [store_key(path.name), *(store_key(path.name, nth) for nth in range(count))]:
                self.store.delete_key(taken)


def store_key(name: str, nth: int | None = None) -> str:
    return f"file/{name}" if nth is None else f"file/{name}/{nth}"
