"""Heads on a frozen backbone: reading the images once, and a step on the features, each compared with a bare loop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.build import build_trunk, read_shape
from dicedist.benchmarks.building import build_step, plan_of, with_method, with_size
from dicedist.benchmarks.costs import bare_optimizer, build_members
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.cluster.world import World
from dicedist.config import Config, compose_config
from dicedist.data import sources
from dicedist.data.frozen import FrozenTrunk
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source, Split, part

SETTINGS = (
    "recipe=heads", "network=timm/tf_efficientnet_lite0", "network.pretrained=null", "data=shapes", "data.size=32",
    "network.enlarge=96", "method=ind",
)  # fmt: skip
IMAGES, STEPS, MANY = 256, 10, 16
THEIRS = "bare PyTorch loop"


def heads(config: Config) -> list[dict[str, Any]]:
    """Time EfficientNet-Lite0 with images enlarged to 96 pixels. Only batch_size and ensemble.size are configurable."""
    asked = with_size(config)
    settings = (f"ensemble.size={asked.ensemble.size}", f"batch_size={asked.batch_size}")
    config, world = compose_config([*SETTINGS, *settings]), World(0, 1, pick_device())
    source = read_by(config, sources.load(config.data), world.device)
    one, many = (replace(config, ensemble=replace(config.ensemble, size=size)) for size in (1, MANY))
    count = f"{config.ensemble.size} heads"
    compared: dict[str, dict[str, Callable[[], object]]] = {
        f"backbone, {IMAGES} images": {THEIRS: bare_reading(source), "ours": reading(source)},
        f"{STEPS} steps of {count}": {
            THEIRS: bare_steps(config, source),
            "method=ind": steps(config, world, source),
            "method=dice": steps(with_method(config, "dice", "branch"), world, source),
        },
        f"{STEPS} steps, method=ind": {
            "1 head": steps(one, world, source),
            f"{MANY} heads": steps(many, world, source),
        },
    }
    rows = []
    for title, sides in compared.items():
        reference = next(iter(sides))
        for row in compare(sides, reference, rounds=5, theirs=[THEIRS] if THEIRS in sides else []):
            ratio = row.pop(f"times {reference}")
            rows.append({"of": title, **row, "times the first": ratio})
    return rows


def read_by(config: Config, source: Source, device: torch.device) -> Source:
    """Return the source with outputs of a random backbone, without caching."""
    plan = plan_of(config)
    shape = read_shape(config, plan)
    outputs_N = torch.randn(len(source.train), 1, *shape)
    frozen = FrozenTrunk(build_trunk(config, plan, device).module.eval(), (), shape, config.data)
    return replace(source, train=replace(source.train, outputs_N=outputs_N), trunk=frozen)


def some_images(source: Source) -> Split:
    return replace(part(source.train, torch.arange(IMAGES)), outputs_N=None)


def reading(source: Source) -> Callable[[], object]:
    trunk, split = source.trunk, some_images(source)
    assert isinstance(trunk, FrozenTrunk)
    outputs = np.empty((IMAGES, 1, *trunk.shape), np.float32)
    return lambda: trunk.fill(outputs, split, source, "train")


def bare_reading(source: Source) -> Callable[[], object]:
    """Return a bare loop over the images, which are already normalized."""
    trunk = source.trunk
    assert isinstance(trunk, FrozenTrunk)
    images_NCHW = torch.cat([*trunk.batches(some_images(source), source, 0)])

    @torch.inference_mode()
    def loop() -> Tensor:
        return torch.cat([trunk.module(images_BCHW).cpu() for images_BCHW in images_NCHW.split(trunk.batch)])

    return loop


def steps(config: Config, world: World, source: Source) -> Callable[[], object]:
    step = build_step(config, world)[0]
    loader = Loader(source.train, config.data, source, config.batch_size, 0, world.device, [0])
    batches = loader.endless()
    return lambda: [step(next(batches)) for _ in range(STEPS)]


def bare_steps(config: Config, source: Source) -> Callable[[], object]:
    outputs_N, labels_N = source.train.outputs_N, source.train.labels_N
    assert outputs_N is not None
    device = pick_device()
    nets = build_members(config, device)
    optimizers = [bare_optimizer(config, net) for net in nets]

    def loop() -> None:
        for _ in range(STEPS):
            rows_B = torch.randint(len(labels_N), (config.batch_size,))
            inputs, labels_B = outputs_N[rows_B, 0].to(device), labels_N[rows_B].to(device)
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels_B).backward()
                optimizer.step()

    return loop
