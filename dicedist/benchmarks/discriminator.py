"""The discriminator's work in one step (gradient, sampling, 4 learning steps, memory) against the literal version.

Legend: M members, B inputs, D features, K classes, S samples, R product pairs per joint pair, P pairs of members.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.memory import ClassMemory
from dicedist.benchmarks.timing import compare
from dicedist.cluster.devices import pick_device
from dicedist.config import Config
from dicedist.config.schema import RedundancyConfig
from dicedist.evaluation.redundancy import PREDICTED

Sizes = tuple[int, int, int]  # members, classes, features
LARGE: Sizes = (5, 1000, 2048)  # five ResNet-50 on ImageNet


def discriminator(config: Config) -> list[dict[str, Any]]:
    rows = []
    for num_members, rounds in ((2, 5), (4, 5), (8, 3)):
        sizes = (num_members, 100, 64)
        alternatives = {"ours": ours(config, sizes), "literal": literal(config, sizes)}
        rows += [{"members": num_members, **row} for row in compare(alternatives, "ours", rounds, theirs=["literal"])]
    return rows


def memory(config: Config) -> list[dict[str, Any]]:
    """Compare partners drawn in place and from a copy of batch and memory, for many classes and wide features."""
    alternatives = {"in place": ours(config, LARGE), "copied": ours(config, LARGE, CopiedMemory)}
    sizes = dict(zip(("members", "classes", "features"), LARGE, strict=True))
    return [{**sizes, **row} for row in compare(alternatives, "in place", 3)]


def batch(config: Config, sizes: Sizes) -> tuple[Features, Tensor]:
    num_members, num_classes, feature_dim = sizes
    shape, device = (num_members, config.batch_size, feature_dim), pick_device()
    labels_B = torch.randint(num_classes, (config.batch_size,), device=device)
    return Features(torch.randn(shape, device=device), torch.rand(shape, device=device)), labels_B


def ours(config: Config, sizes: Sizes, kind: type[ClassMemory] = ClassMemory) -> Callable[[], None]:
    num_members, num_classes, feature_dim = sizes
    w = Discriminator(config.redundancy, num_members, feature_dim, num_classes, True, seed=0)
    w.memory = kind(num_members, feature_dim, num_classes, config.redundancy.memory)
    w = w.to(pick_device())
    optimizer = torch.optim.RMSprop(w.network.parameters(), lr=config.redundancy.lr)

    def step() -> None:
        features, labels_B = batch(config, sizes)
        w.redundancy_gradients(features, labels_B, PREDICTED, (0, 0))
        w.learn(optimizer, features, labels_B, PREDICTED, (0, 0))

    return step


class CopiedMemory(ClassMemory):
    """The memory by its definition: batch and memory are concatenated whenever partners are drawn."""

    def with_batch(self, means_MBD: Tensor, scales_MBD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([means_MBD, self.means_MQD], dim=1), torch.cat([scales_MBD, self.scales_MQD], dim=1)


def literal(config: Config, sizes: Sizes) -> Callable[[], None]:
    num_members, num_classes, feature_dim = sizes
    w = LiteralDiscriminator(config.redundancy, num_members, feature_dim, num_classes, pick_device())

    def step() -> None:
        features, labels_B = batch(config, sizes)
        means_MBD = features.means_MBD.requires_grad_()
        torch.autograd.grad(w.redundancy(means_MBD, features.scales_MBD, labels_B), means_MBD)
        w.learn(means_MBD.detach(), features.scales_MBD, labels_B)

    return step


class LiteralNetwork(nn.Module):
    """w as in the paper: M slots as input, the class embedded twice, K outputs."""

    def __init__(self, num_members: int, feature_dim: int, num_classes: int):
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 64)
        self.first = nn.Linear(num_members * feature_dim + 64, 256)
        self.second = nn.Linear(256 + 64, 256)
        self.third = nn.Linear(256, 100)
        self.last = nn.Linear(100, num_classes)

    def forward(self, slots: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embedding(labels)
        hidden = F.leaky_relu(self.first(torch.cat([slots, embedded], 1)), 0.2)
        hidden = F.leaky_relu(self.second(torch.cat([hidden, embedded], 1)), 0.2)
        hidden = F.leaky_relu(self.third(hidden), 0.2)
        return self.last(hidden).gather(1, labels[:, None])[:, 0]


class LiteralDiscriminator:
    """Steps 2 and 3 of Algorithm 1 in a first implementation: plain Python over classes, pairs and inputs."""

    def __init__(
        self, settings: RedundancyConfig, num_members: int, feature_dim: int, num_classes: int, device: torch.device
    ):
        self.network = LiteralNetwork(num_members, feature_dim, num_classes).to(device)
        self.optimizer = torch.optim.RMSprop(self.network.parameters(), lr=0.005)
        self.num_members, self.num_samples, self.negatives = num_members, settings.num_samples, settings.negatives
        self.pairs = list(itertools.combinations(range(num_members), 2))
        self.memory: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_classes)]

    def redundancy(self, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the loss of Step 2 without its weight; the caller differentiates it."""
        z_MSBD = self.sample(means_MBD, scales_MBD)
        logits = self.network(*self.joint(z_MSBD, labels_B))
        return (10 * torch.tanh(logits / 10)).mean() * len(self.pairs)

    def learn(self, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> float:
        for _ in range(4):
            z_MSBD = self.sample(means_MBD, scales_MBD)
            joint = self.network(*self.joint(z_MSBD, labels_B))
            product = self.network(*self.product(z_MSBD, means_MBD, scales_MBD, labels_B))
            logits = torch.cat([joint, product])
            targets = torch.cat([torch.ones_like(joint), torch.zeros_like(product)])
            loss = F.binary_cross_entropy_with_logits(logits, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        for n, label in enumerate(labels_B.tolist()):
            self.memory[label] = [*self.memory[label], (means_MBD[:, n], scales_MBD[:, n])][-4:]
        return loss.item()

    def sample(self, means_MBD: Tensor, scales_MBD: Tensor) -> Tensor:
        means_MSBD = means_MBD[:, None].expand(-1, self.num_samples, -1, -1)
        return means_MSBD + torch.randn_like(means_MSBD) * scales_MBD[:, None]

    def joint(self, z_MSBD: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for i, j in self.pairs:
            slots_MSBD = torch.zeros_like(z_MSBD)
            slots_MSBD[i], slots_MSBD[j] = z_MSBD[i], z_MSBD[j]
            rows.append(slots_MSBD.permute(1, 2, 0, 3).flatten(0, 1).flatten(1))
        return torch.cat(rows), labels_B.repeat(self.num_samples * len(self.pairs))

    def product(self, z_MSBD: Tensor, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat each joint pair R times, with one member's features from another input of the same class."""
        labels = labels_B.tolist()
        pools = []
        for n, label in enumerate(labels):
            others = [(means_MBD[:, k], scales_MBD[:, k]) for k, same in enumerate(labels) if same == label and k != n]
            pools.append(others + self.memory[label])
        kept = [n for n, pool in enumerate(pools) if pool]
        if not kept:
            return means_MBD.new_zeros(0, self.num_members * means_MBD.shape[-1]), labels_B[:0]
        rows = []
        for i, j in self.pairs:
            for sample in range(self.num_samples):
                for _ in range(self.negatives):
                    drawn = [random.choice(pools[n]) for n in kept]
                    means_BMD, scales_BMD = (torch.stack(values) for values in zip(*drawn, strict=True))
                    stays, moves = random.sample((i, j), 2)
                    slots_BMD = torch.zeros_like(means_BMD)
                    slots_BMD[:, stays] = z_MSBD[stays, sample, kept]
                    mean_BD, scale_BD = means_BMD[:, moves], scales_BMD[:, moves]
                    slots_BMD[:, moves] = mean_BD + torch.randn_like(mean_BD) * scale_BD
                    rows.append(slots_BMD.flatten(1))
        return torch.cat(rows), labels_B[kept].repeat(len(rows))
