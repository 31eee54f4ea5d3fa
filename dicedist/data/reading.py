"""Functions that all readers of files share: the choice of a test set, errors in one line, progress."""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dicedist.algorithm.randomness import generator
from dicedist.cluster.heartbeat import advance
from dicedist.config.schema import RGB, DataConfig
from dicedist.console.lines import printable
from dicedist.console.progress import Progress

SPLITS = ("train", "test")
MEASURED = 2000  # inputs from which mean and deviation are computed, if inputs are not in memory
NAMED = re.compile(r"(?<=cannot identify image file) .*")  # PIL's name for the file, perhaps an address in memory
Item = TypeVar("Item")


def reason(error: BaseException) -> str:
    """Return one printable line that does not name the image."""
    return printable(NAMED.sub("", " ".join(str(error).split()))) or type(error).__name__


def for_test(labels_N: NDArray[np.int64], config: DataConfig) -> NDArray[np.bool_]:
    """Choose data.test_fraction of each class as the test set, for data without a test set."""
    is_test_N = np.zeros(len(labels_N), bool)
    order_N = torch.randperm(len(labels_N), generator=generator("cpu", config.split_seed, "test")).numpy()
    for label in range(labels_N.max() + 1):
        of_class = order_N[labels_N[order_N] == label]
        is_test_N[of_class[: round(config.test_fraction * len(of_class))]] = True
    return is_test_N


def other_channels(config: DataConfig) -> tuple[int, ...]:
    """Return the channels for the name of prepared images; nothing for RGB, as in names of earlier versions."""
    return () if config.channels == RGB else (config.channels,)


def shown(items: Iterable[Item], total: int, noun: str, first: int = 0) -> Iterator[Item]:
    """Yield the items and show how many are done. first: the number that was done before."""
    progress = Progress(total, noun, first, sys.stderr)
    for done, item in enumerate(items, first + 1):
        yield item
        advance()
        progress.show(done)
    progress.clear()
