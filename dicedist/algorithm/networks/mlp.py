"""A perceptron: dense layers of one width, each with its norm and a ReLU; the first half is the trunk.

Legend: B inputs, V values of an input.
"""

import math
from collections.abc import Callable

from torch import nn

from dicedist.algorithm.networks.network import Network
from dicedist.config.schema import NetworkConfig

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": nn.Identity}


def mlp(config: NetworkConfig, input_shape: tuple[int, ...]) -> Network:
    """Map vectors [B, V] or images [B, 3, rows, columns] to features [B, width].

    Dropout is between layers, never on the features themselves.
    """
    assert config.width is not None and config.depth is not None and config.norm is not None
    values, flat = math.prod(input_shape), [] if len(input_shape) == 1 else [nn.Flatten()]
    widths = [values] + [config.width] * config.depth
    layers = [
        layer(inputs, outputs, config.norm, (config.dropout or 0.0) if place else 0.0)
        for place, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False))
    ]
    half = config.depth // 2
    return Network(nn.Sequential(*flat, *layers[:half]), nn.Sequential(*layers[half:]), config.width, config.width)


def layer(inputs: int, outputs: int, norm: str, dropout: float) -> nn.Sequential:
    dense = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(dense.weight, nonlinearity="relu")
    nn.init.zeros_(dense.bias)
    return nn.Sequential(nn.Dropout(dropout), dense, NORMS[norm](outputs), nn.ReLU())
