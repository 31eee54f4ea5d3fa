"""The cost of an ensemble at inference: its parameters, and the floating point operations for one input."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dicedist.algorithm.build import weightless
from dicedist.config.plan import Plan
from dicedist.config.schema import Config


def cost(config: Config, plan: Plan, num_classes: int) -> dict[str, float]:
    """Return parameters and gflops (a multiply-add counts as two operations), without running the networks."""
    networks = weightless(config, plan)
    classifiers = [nn.Linear(network.feature_dim, num_classes, device="meta") for network in networks]
    branches = config.structure == "branch"
    own = [network.branch() if branches else network for network in networks]
    counted = [*own, *classifiers, *([networks[0].trunk] if branches else [])]
    parameters = sum(parameter.numel() for module in counted for parameter in module.parameters())
    alone = torch.empty(1, *plan.input_shape, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        inputs = networks[0].trunk(alone) if branches else alone
        for module, classifier in zip(own, classifiers, strict=True):
            classifier(module.eval()(inputs))
    return {"parameters": config.samples * parameters, "gflops": config.samples * counter.get_total_flops() / 1e9}
