"""Dense layers of one width, each with its norm and a ReLU: a perceptron, or the head of another network.

Legend: B inputs, C channels, V values of an input.
"""

import math
from collections.abc import Callable

from torch import nn

from dicedist.algorithm.networks.network import Network
from dicedist.config.schema import NetworkConfig

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": nn.Identity}


def mlp(config: NetworkConfig, input_shape: tuple[int, ...]) -> Network:
    """Map vectors [B, V] or images [B, C, rows, columns] to features [B, width].

    Dropout is between layers, never on the features themselves.
    """
    values, flat = math.prod(input_shape), [] if len(input_shape) == 1 else [nn.Flatten()]
    layers = hidden(config, values)
    half, width = len(layers) // 2, config.width
    assert width is not None
    return Network(nn.Sequential(*flat, *layers[:half]), nn.Sequential(*layers[half:]), width, width)


def add_head(network: Network, config: NetworkConfig) -> None:
    """Put dense layers behind the features of a network. The last one has feature_dim outputs, if that is set."""
    assert config.width is not None and config.norm is not None
    layers, features = hidden(config, network.feature_dim), config.width
    if config.feature_dim is not None:
        features = config.feature_dim
        layers.append(layer(config.width, features, config.norm, config.dropout or 0.0)[:-1])
    network.projection, network.feature_dim = nn.Sequential(*layers), features


def hidden(config: NetworkConfig, inputs: int) -> list[nn.Sequential]:
    assert config.width is not None and config.depth is not None and config.norm is not None
    widths = [inputs] + [config.width] * config.depth
    return [
        layer(before, width, config.norm, (config.dropout or 0.0) if place else 0.0)
        for place, (before, width) in enumerate(zip(widths, widths[1:], strict=False))
    ]


def layer(inputs: int, outputs: int, norm: str, dropout: float) -> nn.Sequential:
    dense = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(dense.weight, nonlinearity="relu")
    nn.init.zeros_(dense.bias)
    return nn.Sequential(nn.Dropout(dropout), dense, NORMS[norm](outputs), nn.ReLU())
