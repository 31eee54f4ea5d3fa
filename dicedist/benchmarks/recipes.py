"""What our step costs beside a bare PyTorch loop of the same recipe: ResNet-18 on images of 224 pixels, one member."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import build_member
from dicedist.algorithm.objectives import Method
from dicedist.benchmarks.step import bench_step
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.cluster.world import World
from dicedist.config import Config, compose_config

COMPARED = ("scratch224", "finetune")
CLASSES = 100
OURS, THEIRS = "method=ind", "bare PyTorch loop"


def recipes(config: Config) -> list[dict[str, Any]]:
    """Of the given config only batch_size counts. Mixing is left out: the loop would only copy our lines."""
    rows = []
    for recipe in COMPARED:
        settings = compose_config([
            f"recipe={recipe}", "data=folder", "data.root=.", "network=torchvision/resnet18", "network.pretrained=null",
            "method=ind", "ensemble.size=1", "loss.cutmix=0", f"batch_size={config.batch_size}",
        ])  # fmt: skip
        world, size = World(0, 1, pick_device()), settings.data.size
        images = torch.randn(config.batch_size, 3, size, size, device=world.device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels_B = torch.randint(CLASSES, (config.batch_size,), device=world.device)
        batch = Batch(0, 0, len(labels_B), slice(None), labels_B, labels_B, 0, [images])
        ours = functools.partial(bench_step(settings, world, CLASSES), batch)
        sides: dict[str, Callable[[], object]] = {THEIRS: bare(settings, images, labels_B), OURS: ours}
        for row in compare(sides, OURS, rounds=5, theirs=[THEIRS]):
            rows.append({"recipe": recipe, **row, "images/s": config.batch_size / row["seconds"]})
    return rows


def bare(config: Config, images: Tensor, labels_B: Tensor) -> Callable[[], None]:
    """A loop as a training script would be written, with the recipe's optimiser, clipping, smoothing and average."""
    settings = config.optimizer
    net = build_member(config, Method(config.method), 0, CLASSES).to(images.device)
    net = net.to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if settings.name == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), 0.1, settings.momentum, nesterov=settings.nesterov)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(settings.ema)) if settings.ema else None

    def one_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels_B, label_smoothing=config.loss.label_smoothing).backward()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip_norm)
        optimizer.step()
        if average is not None:
            average.update_parameters(net)

    return one_step
