"""Networks by name. Each defines where its trunk ends and where its D features are read."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace

from dicedist.algorithm.networks.foreign import from_target, from_timm, from_torchvision
from dicedist.algorithm.networks.network import Network
from dicedist.config.schema import NetworkConfig

__all__ = ["Network", "build", "build_member"]

NETWORKS: dict[str, Callable[[], Network]] = {}  # gathered from the modules of this folder that define some
for _module in pkgutil.iter_modules(__path__):
    NETWORKS |= getattr(importlib.import_module(f"{__name__}.{_module.name}"), "NETWORKS", {})
FOREIGN: dict[str, Callable[[str], Network]] = {"torchvision": from_torchvision, "timm": from_timm}


def build(config: NetworkConfig) -> Network:
    if config._target_ is not None:
        return from_target(config._target_, config.trusted)
    if config.name in NETWORKS:
        return NETWORKS[config.name]()
    library, _, name = config.name.partition("/")
    if library in FOREIGN:
        return FOREIGN[library](name)
    raise ValueError(f"unknown network {config.name!r}: write one of {', '.join(NETWORKS)}, torchvision/..., timm/...")


def build_member(config: NetworkConfig, member: int) -> Network:
    """The network of one member: `per_member[member]` where members differ."""
    if config.per_member is None:
        return build(config)
    if member >= len(config.per_member):
        named = len(config.per_member)
        raise ValueError(
            f"network.per_member names {named} networks, but there is a member {member}: name one for each"
        )
    return build(replace(config, name=config.per_member[member], _target_=None))
