"""Data sets, one module each: its `SETS` says which names it prepares and how. conf/data/NAME.yaml has the values."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from dicedist.config.schema import DataConfig
from dicedist.data.prepared import Prepared

Prepare = Callable[[DataConfig, Path], Prepared]  # from the config and the folder data.root

SETS: dict[str, Prepare] = {}
for _module in pkgutil.iter_modules(__path__):
    SETS |= importlib.import_module(f"{__name__}.{_module.name}").SETS
