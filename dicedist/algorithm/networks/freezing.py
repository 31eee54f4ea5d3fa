"""Freezes the first layers of a network: their weights and the statistics of their batch norms stay as they are."""

from torch import nn

from dicedist.algorithm.networks.network import Network


def freeze(network: Network, until: str) -> None:
    """until: none, stem (the first layer), all (but a projection), or the name of the last module that is frozen."""
    if until == "none":
        return
    found = network.layers()
    names = [[network.published_name(name) for name in layer] for layer in found]
    last = len(found) if until == "all" else 1
    if until not in ("all", "stem"):
        named = [place for place, layer in enumerate(names) if any(name.startswith(f"{until}.") for name in layer)]
        if not named:
            first = dict.fromkeys(".".join(name.split(".")[:-1][:2]) for layer in names for name in layer[:1])
            raise ValueError(f"network.freeze={until}: write none, stem, all, or a module such as {', '.join(first)}")
        last = named[-1] + 1
    parameters = dict(network.named_parameters())
    for name in (name for layer in found[:last] for name in layer):
        parameters[name].requires_grad_(False)


def frozen_norms(module: nn.Module) -> list[nn.Module]:
    """The batch norms whose weights are frozen: they normalise by their running statistics in training too."""
    return [
        child
        for child in module.modules()
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d)
        and (own := list(child.parameters()))
        and not any(parameter.requires_grad for parameter in own)
    ]
