"""Build the step and the batches that benchmarks measure."""

from dataclasses import replace

import torch

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import Extent
from dicedist.algorithm.build import build_step as assembled
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.objectives.distill import TeacherLogits
from dicedist.algorithm.step import Step
from dicedist.algorithm.trajectories import Trajectories
from dicedist.cluster.assembly import connect, host, placed
from dicedist.cluster.placement import DEFAULT_SIZE
from dicedist.cluster.world import World
from dicedist.config import Config, compose_config
from dicedist.config.plan import Plan

CLASSES = 100
STEPS_PER_EPOCH = 1000
EXTENT = Extent(CLASSES, STEPS_PER_EPOCH)


def with_size(config: Config) -> Config:
    """Return the config with `ensemble.size` as a number."""
    size = DEFAULT_SIZE if config.ensemble.size == "auto" else config.ensemble.size
    return replace(config, ensemble=replace(config.ensemble, size=size))


def with_method(config: Config, name: str, structure: str = "net") -> Config:
    """Return the config with a method and its settings; raise a ValueError if the method lacks the structure."""
    other = compose_config([f"method={name}", f"structure={structure}"])
    changed = replace(
        config,
        method=other.method,
        structure=structure,
        redundancy=replace(config.redundancy, scale=other.redundancy.scale),
        data=replace(config.data, per_member=other.data.per_member, noise=other.data.noise),
        optimizer=replace(config.optimizer, ema=other.optimizer.ema, ema_warmup=other.optimizer.ema_warmup),
        trajectory=other.trajectory,
    )
    if other.trajectory["kind"] == "none":
        return changed
    return replace(changed, epochs=other.epochs, schedules=other.schedules)


def plan_of(config: Config) -> Plan:
    """Return the plan of a config with a fixed size, for images."""
    assert isinstance(config.ensemble.size, int)
    return Plan.of(config, config.ensemble.size, config.data.image_shape)


def build_step(config: Config, world: World, extent: Extent = EXTENT) -> tuple[Step, Trajectories]:
    """Return the step of this rank, and the trajectories of its members. All ranks call this."""
    method = Method(config.method)
    placement = placed(config, method, world.size)
    plan = Plan.of(config, placement.num_members, config.data.image_shape)
    if TeacherLogits in method.probes:
        raise ValueError(f"method={method.name} needs a teacher, but bench loads none: choose another method")
    exchange = connect(config, method, plan, placement, world, extent.num_classes)
    hosted = host(config, method, plan, exchange, extent.num_classes)
    return assembled(config, method, plan, hosted, exchange, extent)


def random_batch(config: Config, device: torch.device) -> Batch:
    images = torch.randn(config.batch_size, *config.data.image_shape, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels_B = torch.randint(CLASSES, (config.batch_size,), device=device)
    return Batch(0, 0, len(labels_B), slice(None), labels_B, labels_B, 0, [images])
