"""The keys of a schema by their full names, for checks, help and completion."""

from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any


@cache
def keys_of(schema: Any) -> dict[str, Field[Any]]:
    """Return every key by its full name, as redundancy.delta, with its field. Groups are included."""
    found = {}
    for entry in fields(schema):
        found[entry.name] = entry
        group: Any = entry.type
        if is_dataclass(entry.type):
            found |= {f"{entry.name}.{name}": inner for name, inner in keys_of(group).items()}
    return found
