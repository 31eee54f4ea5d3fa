"""Data sets: `SETS` of each module lists the names that it prepares. conf/data/NAME.yaml has the values."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dicedist.config.schema import DataConfig
from dicedist.data.prepared import Prepared

SETS: dict[str, Callable[[DataConfig, Path], Prepared]] = {}  # needs the config and data.root
OPENED: dict[str, Callable[[Prepared, str, DataConfig], Any]] = {}  # opens a split that is read at each step
for _module in pkgutil.iter_modules(__path__):
    _set = importlib.import_module(f"{__name__}.{_module.name}")
    SETS |= _set.SETS
    OPENED |= getattr(_set, "OPENED", {})
