"""Diversity inducing information bottleneck (Sinha et al., 2021): an adversary on pairs of features and of noise.

CE_i on one sample of z_i, and delta r/(M-1) times the sum over pairs of

    L_G = E log D(z_i, z_j) + E log(1 - D(e, z_i)) + E log(1 - D(z_i, z_i')),   e ~ N(0, I), z_i' a second sample,

which members minimize: different heads then look different, and a head looks like noise and like itself. D maximizes

    L_D = E log D(e, e') + E log D(z_i, z_j) + E log(1 - D(e, z_i)).

Pairs come from one input, in both orders, and D does not read the class. Unlike in DICE, the gradient also reaches the
scale, because no other loss does. kl="adversarial": the pairs with noise replace VIB's KL, as in the paper's equations.
kl="explicit": VIB's KL to N(0, I), and the pairs with noise give members no gradient. The paper states no layers, no
sample counts and no weights: they are taken from DICE's discriminator.

Legend: M members, B inputs, D features, S samples, P ordered pairs, X rows, H hidden.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.batch import StepKey
from dicedist.algorithm.blockwise import SLOPE
from dicedist.algorithm.counterpart import Counterpart, Read
from dicedist.algorithm.discriminator import HIDDEN, LAST
from dicedist.algorithm.messages import FEATURES, Answers, Sizes, Values
from dicedist.algorithm.objectives import CounterpartTerm, View
from dicedist.algorithm.objectives.vceb import gaussian_divergence
from dicedist.algorithm.pairs import pairs_of, within_budget
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.targets import Targets
from dicedist.config.schema import Config, RedundancyConfig

KL = ("adversarial", "explicit")


class Term(CounterpartTerm):
    gradients = FEATURES

    def __init__(self, kl: str = "adversarial"):
        if kl not in KL:
            raise ValueError(f"method.terms.dibs.kl={kl}: write one of {', '.join(KL)}")
        self.explicit = kl == "explicit"
        self.follows = ("ramp_up", "delta", *(["log_beta"] if self.explicit else []))

    def prior_rows(self, num_classes: int) -> int | None:
        return 0  # the prior is N(0, 1)

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        own = view.own
        assert own.scale_BD is not None
        parts = {"cross_entropy": view.targets.cross_entropy(own.logits_BK)}
        if self.explicit:
            zero_BD = torch.zeros_like(own.mean_BD)
            divergence_B = gaussian_divergence(own.mean_BD, own.scale_BD, zero_BD, own.raw_scale_BD)
            parts["compression"] = now.compression_ib * divergence_B.mean()
        return parts

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        return FEATURES

    def build_counterpart(self, config: Config, sizes: Sequence[Sizes]) -> Counterpart:
        widest = max(size.features for size in sizes)
        return Dibs(config.redundancy, len(sizes), widest, config.seed, pulls_to_noise=not self.explicit)


class PairNetwork(nn.Module):
    """D: 256-256-100-1 on two vectors. Each half of the first layer is applied once to every vector."""

    def __init__(self, feature_dim: int):
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(feature_dim, HIDDEN, bias=half == 0) for half in range(2))
        for parameter in self.halves.parameters():  # as torch initializes one layer of 2 D inputs
            nn.init.uniform_(parameter, -1 / math.sqrt(2 * feature_dim), 1 / math.sqrt(2 * feature_dim))
        self.rest = nn.Sequential(
            nn.LeakyReLU(SLOPE), nn.Linear(HIDDEN, HIDDEN),
            nn.LeakyReLU(SLOPE), nn.Linear(HIDDEN, LAST),
            nn.LeakyReLU(SLOPE), nn.Linear(LAST, 1),
        )  # fmt: skip

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.rest(self.halves[0](first) + self.halves[1](second))[..., 0]

    def both_orders(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.stack([self(one, other), self(other, one)])


class Dibs(Counterpart):
    pairs_P2: Tensor

    def __init__(self, config: RedundancyConfig, num_members: int, feature_dim: int, seed: int, pulls_to_noise: bool):
        super().__init__()
        self.config, self.num_members, self.seed, self.pulls_to_noise = config, num_members, seed, pulls_to_noise
        self.delta = config.delta_for(num_members)
        self.network = PairNetwork(feature_dim)
        self.register_buffer("pairs_P2", pairs_of(num_members), persistent=False)

    def answers(self, read: Read, targets: Targets, now: ScheduleValues, key: StepKey) -> tuple[Answers, Values]:
        draws = generator(targets.labels_B.device, self.seed, "redundancy", *key)
        given = {name: read[name].detach().requires_grad_() for name in FEATURES}
        z_SMBD, again_SMBD = (self.sample(given["mean"], given["scale"], draws) for _ in range(2))
        terms = self.members_terms(z_SMBD, again_SMBD, draws)
        estimate = torch.stack(list(terms.values())).sum()
        weight = self.delta * now.ramp_up / (self.num_members - 1) * len(self.pairs_P2)
        found = torch.autograd.grad(weight * estimate, list(given.values()))
        return Answers(dict(zip(given, found, strict=True))), {"redundancy": estimate.detach()}

    def members_terms(self, z_SMBD: Tensor, again_SMBD: Tensor, draws: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of L_G, which members minimize; pairs with noise only if they replace the KL."""
        terms = {
            "different": F.logsigmoid(self.clipped(self.different(z_SMBD, draws))).mean(),
            "same": F.logsigmoid(-self.clipped(self.network.both_orders(z_SMBD, again_SMBD))).mean(),
        }
        if self.pulls_to_noise:
            with_noise = self.network.both_orders(self.noise_like(z_SMBD, draws), z_SMBD)
            terms["noise"] = F.logsigmoid(-self.clipped(with_noise)).mean()
        return terms

    def study(
        self, optimizer: torch.optim.Optimizer, read: Read, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> dict[str, Tensor]:
        for step in range(self.config.num_steps):
            draws = generator(targets.labels_B.device, self.seed, "discriminator", *key, step)
            z_SMBD = self.sample(read["mean"], read["scale"], draws)
            loss = -self.gain(z_SMBD, draws)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {"discriminator/loss": loss.detach()}

    def gain(self, z_SMBD: Tensor, draws: torch.Generator) -> Tensor:
        """Return L_D, which D maximizes; each part is the mean over its own pairs."""
        real = self.network(self.noise_like(z_SMBD, draws), self.noise_like(z_SMBD, draws))
        fake = self.network.both_orders(self.noise_like(z_SMBD, draws), z_SMBD)
        different = self.different(z_SMBD, draws)
        return F.logsigmoid(real).mean() + F.logsigmoid(different).mean() + F.logsigmoid(-fake).mean()

    def different(self, z_SMBD: Tensor, draws: torch.Generator) -> Tensor:
        """Return D's logits of all pairs of members, in both orders."""
        pairs_P2 = within_budget(self.pairs_P2, self.config.budget, draws)
        return self.network.both_orders(z_SMBD[:, pairs_P2[:, 0]], z_SMBD[:, pairs_P2[:, 1]])

    def sample(self, means_MBD: Tensor, scales_MBD: Tensor, draws: torch.Generator) -> Tensor:
        return means_MBD + scales_MBD * self.noise_like(means_MBD.expand(self.config.num_samples, -1, -1, -1), draws)

    def noise_like(self, values: Tensor, draws: torch.Generator) -> Tensor:
        return torch.randn(values.shape, generator=draws, device=draws.device)

    def clipped(self, logits: Tensor) -> Tensor:
        return self.config.tau * torch.tanh(logits / self.config.tau)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.network.parameters(), lr=self.config.lr, foreach=True)
