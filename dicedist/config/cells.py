"""Cells of the paper's tables as experiments, one row each in conf/cells.csv.

`experiment=small/dice` composes conf/experiment/_small.yaml, which all cells of that folder share, then the network,
structure, size, method and further overrides of its row. The paper's figures are in conf/paper.csv.
"""

import csv
from functools import cache
from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

GROUP = "experiment"


@cache
def read_cells(conf: Path) -> dict[str, dict[str, str]]:
    """Return the rows of conf/cells.csv by name of the cell."""
    with (conf / "cells.csv").open(newline="") as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


class Cells(ConfigSource):
    """A Hydra config source that presents each row of the table as a file of conf/experiment/."""

    @staticmethod
    def scheme() -> str:
        return "cells"

    def available(self) -> bool:
        return True

    def is_config(self, config_path: str) -> bool:
        return config_path.removeprefix(f"{GROUP}/") in read_cells(Path(self.path))

    def is_group(self, config_path: str) -> bool:
        return any(f"{GROUP}/{name}".startswith(f"{config_path}/") for name in read_cells(Path(self.path)))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # only for Hydra's own messages, which compose.explain replaces

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removeprefix(f"{GROUP}/")
        row = read_cells(Path(self.path))[name]
        keys = [f"structure={row['structure']}", f"ensemble.size={row['size']}", *row["overrides"].split()]
        node = OmegaConf.from_dotlist([*keys, f"run.name={name.replace('/', '-')}-seed${{seed}}"])
        chosen = [{f"override /{group}": row[group]} for group in ("network", "method")]
        node.defaults = [f"/{GROUP}/_{name.partition('/')[0]}", "_self_", *chosen]
        return ConfigResult(self.provider, self.full_path(), node, {"package": "_global_"})
