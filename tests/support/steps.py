"""Small steps: a config, a batch of random images, and the step of a rank."""

from dataclasses import replace

import torch

from dicedist.algorithm.batch import Batch, paired, share
from dicedist.algorithm.build import Extent
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.randomness import generator
from dicedist.cluster.assembly import assemble
from dicedist.cluster.placement import place
from dicedist.cluster.world import World
from dicedist.config import compose_config
from dicedist.config.plan import Plan

K, B, STEPS_PER_EPOCH = 10, 24, 4
CPU = torch.device("cpu")
# Late in training beta is small, the ramp-up is over and the scale is half annealed, so every term counts.
LATE = "schedules.scale=false", "schedules.ramp_up=1", "schedules.covariance=[0,2]", "bottleneck.log_beta=[[0,1]]"
STRONG = (*LATE, "redundancy.delta=0.5", "redundancy.num_samples=2")
BOTH = ("net", "branch")
STRUCTURES = {
    "ind": BOTH, "ib": BOTH, "ceb": BOTH, "ibr": BOTH, "cebr": BOTH, "dice": BOTH, "ce_cr": BOTH, "adp": BOTH,
    "dml": ("net",), "cl_ilr": ("branch",), "one": BOTH, "okddip": BOTH, "okddip_ceb": BOTH, "okddip_dice": BOTH,
    "okddip_e": BOTH, "kdcl": ("net",), "gal": ("net",), "gpmr": ("net",), "dibs": BOTH, "pcl": ("branch",),
    "ffl": BOTH, "afd": ("net",), "distill": BOTH,
}  # fmt: skip
ON_MAPS = ("ffl", "afd")
TRAJECTORIES = ("sse", "fge", "swag", "csgld", "vi", "kfac_laplace")
STRUCTURES |= dict.fromkeys(TRAJECTORIES, ("net",))
CASES = [
    (method, structure)
    for method, structures in STRUCTURES.items()
    for structure in structures
    if method not in TRAJECTORIES
]


def configured(size, *overrides):
    base = ["data=shapes", "network=resnet8", "epochs=2", "log.every_steps=1"]
    return compose_config([*base, f"ensemble.size={size}", *overrides])


def side_for(method):
    """Of images: small, unless ranks send what is as large as the config says."""
    return 32 if method in ("gal", "gpmr", *ON_MAPS) else 16


def batch_at(step, size=B, width=None, side=16):
    """Images, or vectors of that width."""
    draws = generator(CPU, 0, "test batch", step)
    shape = (3, side, side) if width is None else (width,)
    images = torch.randn(size, *shape, generator=draws)
    images = images.to(memory_format=torch.channels_last) if width is None else images
    labels = torch.randint(K, (size,), generator=draws)
    epoch, step_in_epoch = divmod(step, STEPS_PER_EPOCH)
    return Batch(epoch, step_in_epoch, size, slice(None), torch.arange(size), labels, 1000 + step, [images])


def share_of(batch, step):
    """Return the batch that the loader of this rank would give: a replica's rows, or no images without members."""
    placement, rank = step.exchange.placement, step.exchange.rank
    if not placement.members_on(rank):
        return replace(batch, images=[])
    rows = share(batch.size, placement.replicas, placement.replica_on(rank))
    loaded = paired(rows, batch.size)  # more than methods without mixing need
    margin = rows.start - loaded.start, loaded.stop - rows.stop
    of_rank = replace(
        batch, rows=rows, labels_B=batch.labels_B[loaded], images=[view[loaded] for view in batch.images], margin=margin
    )
    return of_rank if step.loss.mixup or step.loss.cutmix else of_rank.trimmed()


def plan_of(config):
    """The plan of a config whose size is a number."""
    side, inputs = config.data.size, config.network.inputs
    return Plan.of(config, config.ensemble.size, (3, side, side) if inputs is None else (inputs,))


def build_step(config, rank=0, world_size=1, num_classes=K, device=CPU):
    method = Method(config.method)
    size, replicas = config.ensemble.size, config.ensemble.replicas
    placement = place(world_size, size, method.counterpart is not None, replicas, ranks_of_w=config.redundancy.ranks)
    world, extent = World(rank, world_size, device), Extent(num_classes, STEPS_PER_EPOCH)
    return assemble(config, method, plan_of(config), placement, world, extent, teacher_of_three)


def teacher_of_three(images):
    """Logits [B, 3, K] that depend on every input by itself, as those of a trained ensemble do."""
    flat = images.flatten(1)
    draws = generator(images.device, 0, "teacher", flat.shape[1])
    weights = torch.randn(flat.shape[1], 3 * K, generator=draws, device=images.device) / flat.shape[1] ** 0.5
    return 3 * (flat @ weights).view(-1, 3, K)


def gradients_of(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def weights_of(step):
    """Copies of the weights, by part."""
    return {part.name: {k: v.clone() for k, v in part.module.state_dict().items()} for part in step.hosted.parts}
