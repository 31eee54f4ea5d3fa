"""Data sets, one module each: its `SETS` says which names it prepares and how. conf/data/NAME.yaml has the values."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dicedist.config.schema import DataConfig
from dicedist.data.prepared import Prepared

if TYPE_CHECKING:
    from dicedist.data.encoded import Encoded
    from dicedist.data.sets.own import Items

Prepare = Callable[[DataConfig, Path], Prepared]  # from the config and the folder data.root

SETS: dict[str, Prepare] = {}
OPENED: dict[str, Callable[[Prepared, str, DataConfig], "Encoded | Items"]] = {}  # of what is read anew
for _module in pkgutil.iter_modules(__path__):
    _set = importlib.import_module(f"{__name__}.{_module.name}")
    SETS |= _set.SETS
    OPENED |= getattr(_set, "OPENED", {})
