"""The optimizer of a part: one of torch's, by name, with a learning rate and a weight decay per parameter.

The schedule gives the learning rate of the heads. A parameter of the network has this rate times `backbone_factor`, and
times `layer_decay` for every layer between the parameter and the features: layers near the images learn more slowly.
"""

from typing import Any

import torch
from torch import nn

from dicedist.algorithm.networks.layers import Layers
from dicedist.config.schema import OptimizerConfig

RATE = "rate"  # of a parameter group: the factor on the rate of the schedule


def build_optimizer(
    settings: OptimizerConfig, module: nn.Module, backbone: Layers = (), behind: int = 0, fused: bool = True
) -> torch.optim.Optimizer:
    """Build the optimizer. backbone: the module's layers that belong to the network; all other parameters are heads.

    behind: the number of network layers that follow in another part, as a branch follows the trunk.
    """
    groups = parameter_groups(settings, module, backbone, behind)
    common: dict[str, Any] = {"lr": 1.0, "fused": fused}  # every step sets the rate from the schedule
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.name]
    first, second = settings.betas
    return kind(groups, betas=(first, second), **common)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE]


def parameter_groups(
    settings: OptimizerConfig, module: nn.Module, backbone: Layers = (), behind: int = 0
) -> list[dict[str, Any]]:
    """Group the parameters by learning rate and weight decay; leave out frozen parameters."""
    last = len(backbone) - 1 + behind
    rates = {
        name: settings.backbone_factor * settings.layer_decay ** (last - nth)
        for nth, names in enumerate(backbone)
        for name in names
    }
    spared = set() if settings.decay_norms else undecayed(module)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if name in spared else settings.weight_decay
            groups.setdefault((rates.get(name, 1.0), decay), []).append(parameter)
    groups = groups or {(1.0, 0.0): []}  # an optimizer needs a group, even if nothing learns
    return [{"params": each, RATE: rate, "weight_decay": decay} for (rate, decay), each in groups.items()]


def undecayed(module: nn.Module) -> set[str]:
    """Return parameters without weight decay: norms, biases, and any that a network names (positions, tokens)."""
    names = {name for name, parameter in module.named_parameters() if parameter.ndim <= 1}
    for path, child in module.named_modules():
        if callable(own := getattr(child, "no_weight_decay", None)):
            names |= {f"{path}.{name}" for name in own()}
    return names
