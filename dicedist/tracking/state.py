"""The state of a tracker, saved in the run's folder: how much of the run the tracker has received."""

from pathlib import Path
from typing import Any

from dicedist.runs.files import read_json, replace_json


class State:
    """Values that survive the mirror's process. A missing or damaged file counts as an empty one.

    run_id      the run in the tracker
    received    file of records -> number of lines received
    marks       file of records -> digest of the received lines
    sent        task -> evaluation for which it was done
    """

    def __init__(self, path: Path, **more: Any):
        first: dict[str, Any] = {"run_id": None, "received": {}, "marks": {}, "sent": {}}
        self.path, self.values = path, first | more | read_or_nothing(path)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def keep(self, **changes: Any) -> None:
        self.values |= changes
        replace_json(self.path, self.values)


def read_or_nothing(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file; an empty dict for a missing or damaged file."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
