"""Networks by name. Each defines where its trunk ends and where its D features are read."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace

from dicedist.algorithm.networks.foreign import Unsplit, from_target, from_timm, from_torchvision
from dicedist.algorithm.networks.freezing import freeze
from dicedist.algorithm.networks.mlp import add_head, mlp
from dicedist.algorithm.networks.network import Network, project
from dicedist.config.schema import NetworkConfig

__all__ = ["Network", "build", "build_member"]

# Name -> function that builds the network for a number of channels; gathered from all modules of this folder.
NETWORKS: dict[str, Callable[[int], Network]] = {}
for _module in pkgutil.iter_modules(__path__):
    NETWORKS |= getattr(importlib.import_module(f"{__name__}.{_module.name}"), "NETWORKS", {})
FOREIGN: dict[str, Callable[[str, str | None, int], Network]] = {"torchvision": from_torchvision, "timm": from_timm}


def build(config: NetworkConfig, input_shape: tuple[int, ...]) -> Network:
    """Build a network with random weights. A run loads pretrained weights when it begins (dicedist.runs.pretrained).

    input_shape: (channels, rows, columns) of an image, or (values,) of a vector.
    """
    network = whole(config, input_shape)
    if config.enlarge is not None:
        network.enlarge(config.enlarge)
    if config.has_head:
        network = network.as_trunk() if isinstance(network, Unsplit) else network
        add_head(network, config)
    elif config.feature_dim is not None:
        project(network, config.feature_dim)
    if config.freeze != "norms" or config.pretrained is not None:  # norms of random weights have nothing to keep
        freeze(network, config.freeze)
    return network


def whole(config: NetworkConfig, input_shape: tuple[int, ...]) -> Network:
    reads_vectors = len(input_shape) == 1
    library, _, name = config.name.partition("/")
    if config._target_ is None and library in FOREIGN and not reads_vectors:
        return FOREIGN[library](name, config.split, input_shape[0])
    if config.split is not None:
        raise ValueError(
            f"network.split={config.split}: {config.label} defines its own split point: leave out network.split"
        )
    if config._target_ is not None:
        return from_target(config._target_, config.trusted, input_shape)
    if config.name == "mlp":
        return mlp(config, input_shape)
    if reads_vectors:
        raise ValueError(f"{config.name} reads images, and the data are vectors: write network=mlp")
    if config.name in NETWORKS:
        return NETWORKS[config.name](input_shape[0])
    raise ValueError(
        f"unknown network {config.name!r}: write one of {', '.join(NETWORKS)}, mlp, torchvision/..., timm/..."
    )


def build_member(config: NetworkConfig, member: int, input_shape: tuple[int, ...]) -> Network:
    """Build the network of one member: `per_member[member]` if members differ."""
    if config.per_member is None:
        return build(config, input_shape)
    if member >= len(config.per_member):
        named = len(config.per_member)
        raise ValueError(
            f"network.per_member names {named} networks, but there is a member {member}: name one for each"
        )
    return build(replace(config, name=config.per_member[member], _target_=None), input_shape)
