"""Search spaces, as written on the command line and in conf/evidence/.

redundancy.delta=interval(0.02,0.6,log)     any number in between, on a logarithmic scale; without log on a linear one
optimizer.lr=choice(0.03,0.1,0.3)           one of these values, of whatever kind
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dicedist.config.literal import split_values

WRITTEN = re.compile(r"(interval|choice)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    log: bool
    whole: bool  # only whole numbers


@dataclass(frozen=True)
class Choice:
    values: tuple[str, ...]


Space = Interval | Choice


def spaces_in(values: Mapping[str, str]) -> tuple[dict[str, Space], dict[str, str]]:
    """Return the keys to search over with their spaces, and the other keys with their fixed values."""
    spaces = {key: space for key, text in values.items() if (space := space_of(key, text)) is not None}
    return spaces, {key: text for key, text in values.items() if key not in spaces}


def space_of(key: str, text: str) -> Space | None:
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        return None
    words = [word.strip() for word in split_values(found[2])]
    if found[1] == "choice":
        if len(words) < 2 or not all(words):
            raise ValueError(f"{key}={text}: write at least two values, choice(0.1,0.2)")
        return Choice(tuple(words))
    return interval(key, text, words)


def interval(key: str, text: str, words: list[str]) -> Interval:
    advice = f"{key}={text}: write interval(low,high) or interval(low,high,log), low below high"
    if len(words) not in (2, 3) or words[2:] not in ([], ["log"]):
        raise ValueError(advice)
    try:
        low, high = float(words[0]), float(words[1])
    except ValueError as error:
        raise ValueError(advice) from error
    if not -math.inf < low < high < math.inf:
        raise ValueError(advice)
    log = len(words) == 3
    if log and low <= 0:
        raise ValueError(f"{key}={text}: a logarithmic interval begins above 0")
    return Interval(low, high, log, all(re.fullmatch(r"[+-]?\d+", word) for word in words[:2]))
