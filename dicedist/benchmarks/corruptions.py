"""Images per second of every corruption on one thread, by processor time, which a busy machine hardly changes."""

import statistics
import time
from typing import Any

import numpy as np

from dicedist.config import Config
from dicedist.data import sources
from dicedist.data.corruptions import OPERATORS, SEVERITIES, corrupt

IMAGES = 1000


def corruptions(config: Config) -> list[dict[str, Any]]:
    test = sources.load(config.data).test
    images_NHWC = np.ascontiguousarray(test.images_NHWC[:IMAGES].numpy())
    found = {name: speeds(images_NHWC, name) for name in OPERATORS}
    mean = statistics.harmonic_mean([of_name["mean"] for of_name in found.values()])
    rows = [{"corruption": name, **of_name} for name, of_name in found.items()]
    return [*rows, {"corruption": "all, one after the other", **dict.fromkeys(map(str, SEVERITIES)), "mean": mean}]


def speeds(images_NHWC: np.ndarray, name: str) -> dict[str, float]:
    """Return images/s at each severity, and their harmonic mean."""
    found = {}
    for severity in SEVERITIES:
        started = time.process_time()
        corrupt(images_NHWC, name, severity)
        found[str(severity)] = len(images_NHWC) / (time.process_time() - started)
    return {**found, "mean": statistics.harmonic_mean(list(found.values()))}
