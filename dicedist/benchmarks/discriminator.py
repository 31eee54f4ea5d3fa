"""The discriminator's work in one step (gradient, sampling, 4 learning steps, memory) against the literal version."""

from typing import Any

import torch

from dicedist.algorithm.adversary import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.benchmarks.literal import LiteralDiscriminator
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.config import Config
from dicedist.evaluation.redundancy import PREDICTED

NUM_CLASSES, FEATURE_DIM = 100, 64


def discriminator(config: Config) -> list[dict[str, Any]]:
    rows, device = [], pick_device()
    for num_members, rounds in ((2, 5), (4, 5), (8, 3)):
        alternatives = {"ours": ours(config, num_members, device), "literal": literal(config, num_members, device)}
        rows += [{"members": num_members, **row} for row in compare(alternatives, "ours", rounds, theirs=["literal"])]
    return rows


def batch(config: Config, num_members: int, device: torch.device) -> tuple[Features, torch.Tensor]:
    shape = (num_members, config.batch_size, FEATURE_DIM)
    labels_B = torch.randint(NUM_CLASSES, (config.batch_size,), device=device)
    return Features(torch.randn(shape, device=device), torch.rand(shape, device=device)), labels_B


def ours(config: Config, num_members: int, device: torch.device) -> Any:
    w = Discriminator(config.redundancy, num_members, FEATURE_DIM, NUM_CLASSES, True, seed=0).to(device)
    optimizer = torch.optim.RMSprop(w.network.parameters(), lr=config.redundancy.lr)

    def step() -> None:
        features, labels_B = batch(config, num_members, device)
        w.redundancy_gradients(features, labels_B, PREDICTED, (0, 0))
        w.learn(optimizer, features, labels_B, PREDICTED, (0, 0))

    return step


def literal(config: Config, num_members: int, device: torch.device) -> Any:
    settings = config.redundancy
    w = LiteralDiscriminator(num_members, FEATURE_DIM, NUM_CLASSES, settings.num_samples, settings.negatives, device)

    def step() -> None:
        features, labels_B = batch(config, num_members, device)
        means_MBD = features.means_MBD.requires_grad_()
        torch.autograd.grad(w.redundancy(means_MBD, features.scales_MBD, labels_B), means_MBD)
        w.learn(means_MBD.detach(), features.scales_MBD, labels_B)

    return step
