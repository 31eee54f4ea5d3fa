"""The memory of a rank's parts before any image: weights, gradients, optimizer states, averages."""

from collections.abc import Sequence

import torch
from torch import nn

from dicedist.algorithm.build import build_counterpart, sizes, weightless
from dicedist.algorithm.member import Member
from dicedist.algorithm.objectives import Method
from dicedist.config.plan import Plan
from dicedist.config.schema import Config, OptimizerConfig

FLOAT = torch.float32.itemsize
OF_W = 3  # copies: weights, gradients, one optimizer state (RMSProp's mean square, or a momentum)
OF_ADAM = 4  # copies: weights, gradients, two moments


def footprint(
    config: Config, method: Method, plan: Plan, members: Sequence[int], hosts_discriminator: bool, num_classes: int
) -> dict[str, int]:
    """Return bytes by kind of part, without allocating any weights."""
    size, networks = plan.num_members, weightless(config, plan)
    branches = config.structure == "branch"
    with torch.device("meta"):
        hosted = [
            Member(networks[member].branch() if branches else networks[member], num_classes, rows)
            for rows in [method.prior_rows(num_classes)]
            for member in members
        ]
        needed = {"members": sum(bytes_of(member, config.optimizer) for member in hosted)}
        if branches and members:
            needed["trunk"] = bytes_of(networks[0].trunk, config.optimizer)
        of_members = sizes(config, method, plan, num_classes)
        for index, member in zip(members, hosted, strict=True):
            if (companion := method.companion(index, of_members)) is not None:
                own = FLOAT * (OF_ADAM * count(companion) + 2 * count(member.encoder))
                needed["companions"] = needed.get("companions", 0) + own
        if hosts_discriminator:
            assert method.counterpart is not None
            w = build_counterpart(config, method, plan, num_classes)
            copies = OF_W + bool(method.estimator)  # evaluation reads an average of w
            needed["w" if method.estimator else method.counterpart.part] = copies * FLOAT * count(w)
        if hosts_discriminator and method.estimator:
            kept = config.redundancy.memory * num_classes + 1 + config.batch_size
            width = max(networks[member].feature_dim for member in method.compared(size))
            needed["class memory"] = 2 * FLOAT * len(method.compared(size)) * kept * width  # means and scales
    return {name: size for name, size in needed.items() if size}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def bytes_of(module: nn.Module, settings: OptimizerConfig) -> int:
    weights = count(module)
    learning = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    states = (settings.momentum > 0) if settings.name == "sgd" else 2
    return FLOAT * (weights * (1 + (settings.ema is not None)) + learning * (1 + states))
