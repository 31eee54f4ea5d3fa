"""Small steps: a config, a batch of random images, and the step of a rank."""

import torch

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.randomness import generator
from dicedist.cluster.assembly import assemble
from dicedist.cluster.placement import place
from dicedist.cluster.world import World
from dicedist.config import compose_config

K, B, STEPS_PER_EPOCH = 10, 24, 4
CPU = torch.device("cpu")
# Late in training beta is small, the ramp-up is over and the scale is half annealed, so every term counts.
LATE = "schedules.scale=false", "schedules.ramp_up=1", "schedules.covariance=[0,2]", "bottleneck.log_beta=[[0,1]]"
STRONG = (*LATE, "redundancy.delta=0.5", "redundancy.num_samples=2")
BOTH = ("net", "branch")
STRUCTURES = {
    "ind": BOTH, "ib": BOTH, "ceb": BOTH, "ibr": BOTH, "cebr": BOTH, "dice": BOTH, "ce_cr": BOTH, "adp": BOTH,
    "dml": ("net",), "cl_ilr": ("branch",), "one": BOTH, "okddip": BOTH, "okddip_ceb": BOTH, "okddip_dice": BOTH,
}  # fmt: skip
CASES = [(method, structure) for method, structures in STRUCTURES.items() for structure in structures]


def configured(size, *overrides):
    return compose_config(["data=shapes", "network=resnet8", "epochs=2", f"ensemble.size={size}", *overrides])


def batch_at(step, size=B):
    draws = generator(CPU, 0, "test batch", step)
    images = torch.randn(size, 3, 16, 16, generator=draws).to(memory_format=torch.channels_last)
    labels = torch.randint(K, (size,), generator=draws)
    epoch, step_in_epoch = divmod(step, STEPS_PER_EPOCH)
    return Batch(epoch, step_in_epoch, size, slice(None), torch.arange(size), labels, 1000 + step, [images])


def build_step(config, rank=0, world_size=1, num_classes=K):
    needs_w = Method(config.method).adversarial is not None
    placement = place(world_size, config.ensemble.size, needs_w, config.ensemble.replicas)
    return assemble(config, placement, World(rank, world_size, CPU), num_classes, STEPS_PER_EPOCH)[0]


def gradients_of(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def weights_of(step):
    """Copies of the weights, by part."""
    return {part.name: {k: v.clone() for k, v in part.module.state_dict().items()} for part in step.hosted.parts}
