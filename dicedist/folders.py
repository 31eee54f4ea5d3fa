"""Folders that a run writes to: whether it may, asked before anything that takes minutes."""

import os
from pathlib import Path


def refuse_unwritable(folder: Path, instead: str) -> None:
    """The folder need not exist, if it can be made. instead: what else someone may write."""
    # os.path: Path.exists raises where a folder above may not be entered.
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.access(nearest, os.W_OK | os.X_OK):
        owner, user = nearest.stat().st_uid, os.geteuid()
        raise ValueError(
            f"user {user} cannot write to {nearest.absolute()}, which belongs to user {owner}: "
            f"chown it to {user}, or run as its owner (docker run --user {owner}), or {instead}"
        )
