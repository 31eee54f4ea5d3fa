"""The cost of steps compared with a bare loop, with a plain implementation of DICE, and with `ind`.

Legend: M members, B inputs, D features.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import Extent, build_member
from dicedist.algorithm.member import Member
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.objectives.distill import TeacherLogits
from dicedist.algorithm.objectives.vceb import gaussian_divergence
from dicedist.benchmarks.building import (
    CLASSES,
    STEPS_PER_EPOCH,
    build_step,
    plan_of,
    random_batch,
    with_method,
    with_size,
)
from dicedist.benchmarks.discriminator import LiteralDiscriminator
from dicedist.benchmarks.timing import compare, seconds
from dicedist.cluster.devices import pick_device
from dicedist.cluster.world import World
from dicedist.config import Config, choices_of, compose_config
from dicedist.config.schema import STRUCTURES
from dicedist.data import sources
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source

FORWARD = 1 / 3  # the share of a step's time that reading an input takes
RECIPES = ("scratch224", "finetune")
OURS, THEIRS = "method=ind", "bare PyTorch loop"


def cost(config: Config) -> list[dict[str, Any]]:
    """Compare a bare loop, method=ind, method=dice and plain DICE, on one rank with the same members and batch."""
    config, world = with_size(config), World(0, 1, pick_device())
    batch = random_batch(config, world.device)
    ours = {
        f"method={name}": partial(build_step(with_method(config, name), world)[0], batch) for name in ("ind", "dice")
    }
    uncompiled = replace(with_method(config, "dice"), compile=False)
    alternatives: dict[str, Callable[[], Any]] = {
        "bare PyTorch loop, independent": bare_loop(uncompiled, batch),
        **ours,
        "DICE written plainly": plain(uncompiled, batch),
    }
    return compare(alternatives, "method=ind", rounds=5, theirs=alternatives.keys() - ours.keys())


def recipes(config: Config) -> list[dict[str, Any]]:
    """Time ResNet-18 on images of 224 pixels, one member. Only batch_size is taken from the config.

    Mixing is left out, because the bare loop would only copy our code.
    """
    rows = []
    for recipe in RECIPES:
        settings = compose_config([
            f"recipe={recipe}", "data=folder", "data.root=.", "network=torchvision/resnet18", "network.pretrained=null",
            "method=ind", "ensemble.size=1", "loss.cutmix=0", f"batch_size={config.batch_size}",
        ])  # fmt: skip
        world = World(0, 1, pick_device())
        batch = random_batch(settings, world.device)
        ours: Callable[[], object] = partial(build_step(settings, world)[0], batch)
        sides = {THEIRS: bare_loop(settings, batch), OURS: ours}
        for row in compare(sides, OURS, rounds=5, theirs=[THEIRS]):
            rows.append({"recipe": recipe, **row, "images/s": config.batch_size / row["seconds"]})
    return rows


def build_members(config: Config, device: torch.device) -> list[Member]:
    """Build all members of the ensemble without a step."""
    method, plan = Method(config.method), plan_of(config)
    return [build_member(config, method, plan, member, CLASSES).to(device) for member in range(plan.num_members)]


def bare_loop(config: Config, batch: Batch) -> Callable[[], None]:
    """Return a step of independent members as in a plain training script: optimizer, clipping and moving average."""
    (images,), labels_B, settings = batch.images, batch.labels_B, config.optimizer
    nets = [net.to(memory_format=torch.channels_last) for net in build_members(config, images.device)]
    optimizers = [bare_optimizer(config, net) for net in nets]
    decay = settings.ema
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay)) for net in nets] if decay else []

    def one_step() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels_B, label_smoothing=config.loss.label_smoothing).backward()
            if settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), settings.clip_norm)
            optimizer.step()
        for net, average in zip(nets, averages, strict=False):
            average.update_parameters(net)

    return one_step


def bare_optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    settings = config.optimizer
    if settings.name != "sgd":
        return torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        net.parameters(), 0.1, settings.momentum, weight_decay=settings.weight_decay, nesterov=settings.nesterov
    )


def plain(config: Config, batch: Batch) -> Callable[[], None]:
    """Return a step of DICE in a first implementation: default memory format, one graph, the literal discriminator."""
    images, labels_B, size = batch.images[0].contiguous(), batch.labels_B, plan_of(config).num_members
    nets = build_members(config, images.device)
    optimizer = bare_optimizer(config, nn.ModuleList(nets))
    dim = nets[0].classifier.in_features
    w = LiteralDiscriminator(config.redundancy, size, dim, CLASSES, images.device)

    def one_step() -> None:
        means, scales, loss = [], [], images.new_zeros(())
        for net in nets:
            encoding = net.encode(images, torch.randn(len(images), dim, device=images.device))
            assert net.bottleneck is not None and encoding.scale_BD is not None
            prior_BD = net.bottleneck.prior_KD[labels_B]
            divergence_B = gaussian_divergence(encoding.mean_BD, encoding.scale_BD, prior_BD)
            loss = loss + F.cross_entropy(encoding.logits_BK, labels_B) + 0.1 * divergence_B.mean()
            means.append(encoding.mean_BD)
            scales.append(encoding.scale_BD.detach())
        means_MBD, scales_MBD = torch.stack(means), torch.stack(scales)
        loss = loss + 0.2 / (size - 1) * w.redundancy(means_MBD, scales_MBD, labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.learn(means_MBD.detach(), scales_MBD, labels_B)

    return one_step


def method_costs(config: Config) -> list[dict[str, Any]]:
    """Return one row per method and structure, in one process; costs are multiples of ind in the same structure."""
    config, source, world = with_size(config), sources.load(config.data), World(0, 1, pick_device())
    rows = []
    for structure in STRUCTURES:
        trained = [each for each in configs(config, structure) if TeacherLogits not in Method(each.method).probes]
        steps = {each.method.name: stepping(each, world, source) for each in trained}
        costs = compare(steps, "ind", rounds=5)
        rows += [{"structure": structure, "method": cost.pop(""), **cost} for cost in costs]
    return rows


def configs(config: Config, structure: str) -> list[Config]:
    """Return the config for each method that supports the structure."""
    found = []
    for name in choices_of("method"):
        with contextlib.suppress(ValueError):  # the method does not support it
            found.append(with_method(config, name, structure))
    return found


def stepping(config: Config, world: World, source: Source) -> Callable[[], object]:
    """Return a step of the method on its first batch, with all members in this process.

    A trajectory's step belongs to its last epoch, in which noise is added and posteriors are sampled. Its work after
    training is not included.
    """
    members = list(range(plan_of(config).num_members)) if config.data.per_member else [0]
    loader = Loader(source.train, config.data, source, config.batch_size, config.seed, world.device, members)
    batch = next(loader.epoch(0))
    num_steps = config.epochs * STEPS_PER_EPOCH
    last = num_steps - STEPS_PER_EPOCH // 2
    counts = source.train.labels_N.bincount(minlength=source.num_classes).tolist()
    step, paths = build_step(config, world, Extent(source.num_classes, STEPS_PER_EPOCH, num_steps, counts))

    def one() -> None:
        paths.before_step(last - 1)
        step(batch)
        paths.after_step(last)

    return one


def device_hours(config: Config, source: Source) -> float:
    """Estimate the hours of one core (or GPU) for a training and its evaluation, from two steps."""
    one = stepping(config, World(0, 1, pick_device()), source)
    one()
    per_step, steps_per_epoch = seconds(one), num_batches(len(source.train), config.batch_size)
    validations = config.epochs // config.evaluate.every_epochs if len(source.val) else 0
    watched = min(config.evaluate.train_images, len(source.train))
    read = validations * (len(source.val) + watched) + (len(source.val) + len(source.test)) * config.samples
    return per_step * (config.epochs * steps_per_epoch + FORWARD * read / config.batch_size) / 3600
