"""Freeze the first layers of a network: their weights and the statistics of their batch norms stay unchanged."""

import re
from collections.abc import Collection

from torch import nn

from dicedist.algorithm.networks.network import Network

# layer3 of a ResNet, stages.2 of a ConvNeXt, blocks.5 of a ViT
STAGE = re.compile(r"[a-z_]+\d+(?=\.)|[a-z_]+\.\d+(?=\.)")


def freeze(network: Network, until: str) -> None:
    """Freeze up to `until`: none, trunk, stem (the first layer), all (except a projection), or a module, as stage3.

    norms: freeze batch norms only, except in a projection.
    """
    if until == "none":
        return
    if until == "norms":
        for name, norm in batch_norms(network).items():
            norm.requires_grad_(name.startswith("projection."))
        return
    if until == "trunk":
        network.trunk.requires_grad_(False)
        return
    found = network.layers()
    names = [[network.published_name(name) for name in layer] for layer in found]
    last = len(found) if until == "all" else 1
    if until not in ("all", "stem"):
        stages = list(dict.fromkeys(match[0] for layer in names[1:] if (match := STAGE.match(layer[0]))))
        module = {f"stage{number}": stage for number, stage in enumerate(stages, 1)}.get(until, until)
        named = [place for place, layer in enumerate(names) if any(name.startswith(f"{module}.") for name in layer)]
        if not named:
            known = f"stage1 to stage{len(stages)}, or a module such as {', '.join(stages)}"
            raise ValueError(f"network.freeze={until}: write none, norms, trunk, stem, all, {known}")
        last = named[-1] + 1
    parameters = dict(network.named_parameters())
    for name in (name for layer in found[:last] for name in layer):
        parameters[name].requires_grad_(False)


def frozen_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms whose weights are frozen: they normalize by their running statistics in training too."""
    return {
        name: norm
        for name, norm in batch_norms(module).items()
        if (own := list(norm.parameters())) and not any(parameter.requires_grad for parameter in own)
    }


def to_training(module: nn.Module, frozen: Collection[str]) -> nn.Module:
    """Switch to training mode. frozen: the names of batch norms that keep normalizing by their running statistics."""
    module.train()
    for name in frozen:
        module.get_submodule(name).eval()
    return module


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    named = module.named_modules()
    return {name: child for name, child in named if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d)}
