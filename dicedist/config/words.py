"""Convert keys of a run's configuration to overrides, for another run with the same values."""

import json
from collections.abc import Sequence
from typing import Any

from dicedist.config.compose import compose_typed, flatten
from dicedist.config.literal import PLAIN
from dicedist.config.schema import Config

SPECIAL = ("null", "true", "false")


def words_of(config: Config, groups: Sequence[str], behind: Sequence[str]) -> list[str]:
    """Return the overrides that, added after `behind`, give the keys of these groups the values of the config."""
    by_default = flatten(compose_typed("train", behind, Config))
    named = {key: value for key, value in flatten(config).items() if key.startswith(tuple(groups))}
    return [word(key, value) for key, value in named.items() if value != by_default.get(key)]


def word(key: str, value: Any) -> str:
    """Return key=value as a user would write it, and as `literal` reads it."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    return f"{key}={value}" if PLAIN.fullmatch(value) and value not in SPECIAL else f"{key}='{value}'"
