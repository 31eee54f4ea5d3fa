"""The discriminator's work in one step (gradient, sampling, 4 learning steps, memory) against the literal version."""

from typing import Any

import torch

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.memory import ClassMemory
from dicedist.benchmarks.literal import LiteralDiscriminator
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.config import Config
from dicedist.evaluation.redundancy import PREDICTED

NUM_CLASSES, FEATURE_DIM = 100, 64
LARGE = (5, 1000, 2048)  # members, classes, features: five ResNet-50 on ImageNet


def discriminator(config: Config) -> list[dict[str, Any]]:
    rows, device = [], pick_device()
    for num_members, rounds in ((2, 5), (4, 5), (8, 3)):
        alternatives = {"ours": ours(config, num_members, device), "literal": literal(config, num_members, device)}
        rows += [{"members": num_members, **row} for row in compare(alternatives, "ours", rounds, theirs=["literal"])]
    return rows


def memory(config: Config) -> list[dict[str, Any]]:
    """Many classes and wide features: partners drawn in place, and from a copy of batch and memory as before."""
    device, (num_members, num_classes, feature_dim) = pick_device(), LARGE
    alternatives = {
        "in place": ours(config, num_members, device, num_classes, feature_dim),
        "copied": ours(config, num_members, device, num_classes, feature_dim, copies=True),
    }
    sizes = {"members": num_members, "classes": num_classes, "features": feature_dim}
    return [{**sizes, **row} for row in compare(alternatives, "in place", 3)]


def batch(
    config: Config,
    num_members: int,
    device: torch.device,
    num_classes: int = NUM_CLASSES,
    feature_dim: int = FEATURE_DIM,
) -> tuple[Features, torch.Tensor]:
    shape = (num_members, config.batch_size, feature_dim)
    labels_B = torch.randint(num_classes, (config.batch_size,), device=device)
    return Features(torch.randn(shape, device=device), torch.rand(shape, device=device)), labels_B


def ours(
    config: Config,
    num_members: int,
    device: torch.device,
    num_classes: int = NUM_CLASSES,
    feature_dim: int = FEATURE_DIM,
    copies: bool = False,
) -> Any:
    w = Discriminator(config.redundancy, num_members, feature_dim, num_classes, True, seed=0).to(device)
    if copies:
        w.memory = CopiedMemory(num_members, feature_dim, num_classes, config.redundancy.memory).to(device)
    optimizer = torch.optim.RMSprop(w.network.parameters(), lr=config.redundancy.lr)

    def step() -> None:
        features, labels_B = batch(config, num_members, device, num_classes, feature_dim)
        w.redundancy_gradients(features, labels_B, PREDICTED, (0, 0))
        w.learn(optimizer, features, labels_B, PREDICTED, (0, 0))

    return step


class CopiedMemory(ClassMemory):
    """The memory as its definition says: batch and memory side by side, copied whenever partners are drawn."""

    def with_batch(self, means_MBD: torch.Tensor, scales_MBD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([means_MBD, self.means_MQD], dim=1), torch.cat([scales_MBD, self.scales_MQD], dim=1)


def literal(config: Config, num_members: int, device: torch.device) -> Any:
    settings = config.redundancy
    w = LiteralDiscriminator(num_members, FEATURE_DIM, NUM_CLASSES, settings.num_samples, settings.negatives, device)

    def step() -> None:
        features, labels_B = batch(config, num_members, device)
        means_MBD = features.means_MBD.requires_grad_()
        torch.autograd.grad(w.redundancy(means_MBD, features.scales_MBD, labels_B), means_MBD)
        w.learn(means_MBD.detach(), features.scales_MBD, labels_B)

    return step
