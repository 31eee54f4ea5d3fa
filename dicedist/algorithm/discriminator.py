"""The discriminator w: distinguishes features of one input from features of two inputs of the same class.

The paper's network reads M slots side by side, one per member, and fills all but two with zeros. An embedding of the
class enters its first two layers, and it has one output per class. This module computes the same function without the
zeros. Each slot's part of the first layer is applied once to its member's features, and the results are added per pair.
The embedding becomes a table with one row per class. Only the output of the input's class is computed.
tests/algorithm1.py has the literal network.

Legend: M members, B inputs, D features, K classes, S samples, R product pairs per joint pair, P pairs of members, X
rows, H hidden.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.batch import StepKey
from dicedist.algorithm.blockwise import SLOPE, blockwise_gradients
from dicedist.algorithm.counterpart import Adversary, Features
from dicedist.algorithm.member import to_float32
from dicedist.algorithm.memory import ClassMemory
from dicedist.algorithm.messages import times
from dicedist.algorithm.pairs import PairPlan, PairTable, Partners, pairs_of, within_budget
from dicedist.algorithm.randomness import generator, seed_for
from dicedist.algorithm.recorded import Recorded
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import RedundancyConfig

EMBEDDING, HIDDEN, LAST = 64, 256, 100
NOTHING = torch.empty(0)


class PairClassifier(nn.Module):
    """The network of w. Unconditional redundancy uses it with a single class and no embedding."""

    def __init__(self, num_members: int, feature_dim: int, num_classes: int, hidden: int = HIDDEN):
        super().__init__()
        embedding = EMBEDDING if num_classes > 1 else 0
        self.slots_MDH = nn.Parameter(torch.empty(num_members, feature_dim, hidden))
        self.embedding_KE = nn.Parameter(torch.empty(num_classes, embedding))
        self.embedding_first_EH = nn.Parameter(torch.empty(embedding, hidden))
        self.first_bias = nn.Parameter(torch.empty(hidden))
        self.embedding_second_EH = nn.Parameter(torch.empty(embedding, hidden))
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, LAST)
        self.last = nn.Linear(LAST, num_classes)
        self.initialize(num_members * feature_dim + embedding, hidden + embedding)

    def initialize(self, first_inputs: int, second_inputs: int) -> None:
        """Draw the weights as torch.nn.Linear and Embedding would for the literal layers."""
        first, second = 1 / math.sqrt(first_inputs), 1 / math.sqrt(second_inputs)
        for parameter in (self.slots_MDH, self.embedding_first_EH, self.first_bias):
            nn.init.uniform_(parameter, -first, first)
        for tensor in (self.embedding_second_EH, self.second.weight, self.second.bias):
            nn.init.uniform_(tensor, -second, second)
        nn.init.normal_(self.embedding_KE)

    def project(self, z_MBD: Tensor) -> Tensor:
        """Apply each member's part of the first layer; any number of dimensions may lie between M and D."""
        return torch.bmm(z_MBD.flatten(1, -2), self.slots_MDH).unflatten(1, z_MBD.shape[1:-1])

    def of_class(self, labels_B: Tensor) -> "ClassRows":
        """Return the parts of the layers that depend on the class of each input."""
        first_KH = self.embedding_KE @ self.embedding_first_EH + self.first_bias
        second_KH = self.embedding_KE @ self.embedding_second_EH + self.second.bias
        tables = (first_KH, second_KH, self.last.weight, self.last.bias[:, None])
        first_BH, second_BH, last_BL, last_B1 = (F.embedding(labels_B, table) for table in tables)
        return ClassRows(first_BH, second_BH, last_BL, last_B1.flatten())

    def logits(self, first_XBH: Tensor, of_class: "ClassRows") -> Tensor:
        """Return log f = log w/(1-w) for rows of first-layer sums."""
        hidden = F.leaky_relu(first_XBH, SLOPE)
        hidden = F.leaky_relu(hidden @ self.second.weight.T + of_class.second_BH, SLOPE)
        hidden = F.leaky_relu(self.third(hidden), SLOPE)
        return torch.einsum("xbl,bl->xb", hidden, of_class.last_BL) + of_class.last_B

    def independence(self, means_MBD: Tensor, labels_B: Tensor, pairs_P2: Tensor) -> Tensor:
        """Return the mean over pairs of 1 - w(z_i, z_j, y) with z = means: low for redundant features.

        docs/choices.md, 13: the paper has 1 - w in its text, but w in an appendix. Unconditional w ignores the labels.
        """
        first_MBH = self.project(means_MBD)
        of_class = self.of_class(labels_B if len(self.embedding_KE) > 1 else torch.zeros_like(labels_B))
        first_PBH = first_MBH[pairs_P2[:, 0]] + first_MBH[pairs_P2[:, 1]] + of_class.first_BH
        return torch.sigmoid(-self.logits(first_PBH, of_class)).mean(0)


@dataclass(frozen=True)
class ClassRows:
    first_BH: Tensor
    second_BH: Tensor
    last_BL: Tensor
    last_B: Tensor


@dataclass(frozen=True)
class Comparison:
    """Pairs of features laid out for w: a row of the first layer is stays[first] + moves[second].

    The joint pairs' rows come first, then the product pairs'.
    """

    stays_YBH: Tensor
    moves_ZBH: Tensor
    plan: PairPlan
    of_class: ClassRows


@dataclass(frozen=True)
class Drawn:
    """All random numbers of one comparison, in the order of their draws."""

    noise_MSBD: Tensor | None  # on the batch's features
    chance_BX: Tensor = NOTHING  # of each candidate to be the partner
    noise_MXBD: Tensor | None = None  # on the partners' features
    moved_PSR: Tensor = NOTHING  # the member of each pair that takes its features from the partner


class Discriminator(Adversary):
    """w and the class memory: Steps 2 and 3 of Algorithm 1.

    Ranks that divide w (redundancy.ranks) compare some pairs of members each. All of them make the same draws as a
    single rank, and sum the gradients of w in every learning step, so their copies of w and of the memory stay equal.
    """

    divisible = True
    pairs_P2: Tensor

    def __init__(
        self,
        config: RedundancyConfig,
        num_members: int,
        feature_dim: int,
        num_classes: int,
        conditional: bool,
        seed: int,
    ):
        super().__init__()
        self.config, self.seed, self.conditional = config, seed, conditional
        self.num_members, self.num_classes = num_members, num_classes if conditional else 1
        self.delta = config.delta_for(num_members)
        self.network = PairClassifier(num_members, feature_dim, self.num_classes, config.width)
        self.memory = ClassMemory(num_members, feature_dim, self.num_classes, config.memory)
        self.tables: dict[int, PairTable] = {}  # of all pairs, by product pairs per joint pair
        self.recorded: Recorded | None = None  # the learning as a CUDA graph
        self.in_blocks = True  # on a CPU, where a block stays in the cache
        self.register_buffer("pairs_P2", pairs_of(num_members), persistent=False)

    @property
    def weights(self) -> nn.Module:
        """Return w without its class memory."""
        return self.network

    def redundancy_gradients(
        self, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return d(redundancy loss)/d(means) [M, B, D]; the scales get no gradient (docs/choices.md, 9)."""
        means_MBD = features.means_MBD.detach().requires_grad_()
        estimate = self.estimate(Features(means_MBD, features.scales_MBD), labels_B, now, key)
        weight = estimate.new_full((), self.weight(now))
        (gradients_MBD,) = torch.autograd.grad(estimate, means_MBD, weight)
        return gradients_MBD, self.named(estimate.detach())

    def estimate(self, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey) -> Tensor:
        """Return this rank's share of the redundancy, averaged over all pairs."""
        draws = generator(labels_B.device, self.seed, "redundancy", *key)
        pairs_P2 = within_budget(self.pairs_P2, self.config.budget, draws)
        terms = self.redundancy(features, self.classes(labels_B), pairs_P2, now, draws)
        return times(self.fraction(len(pairs_P2)), reduce(torch.add, terms.values()))

    def named(self, estimate: Tensor) -> dict[str, Tensor]:
        """Name the values for the records."""
        # w sees R product pairs to a joint one, so f is the density ratio over R; in both terms together R cancels.
        shift = {"lhs": 1, "rhs": -1, "both": 0}[self.config.terms] * math.log(self.config.negatives)
        whole = times(self.division.ranks, estimate)  # the records average over ranks
        return {"redundancy": whole, "redundancy_nats": whole + shift}

    def fraction(self, num_pairs: int) -> float:
        """Return this rank's share of `num_pairs` pairs."""
        own = self.division.own(num_pairs)
        return (own.stop - own.start) / num_pairs

    def weight(self, now: ScheduleValues) -> float:
        """Return the weight of the mean over pairs: delta / (M - 1) for each pair, with the ramp-up."""
        return self.delta * now.ramp_up / (self.num_members - 1) * len(self.pairs_P2)

    def redundancy(
        self, features: Features, labels_B: Tensor, pairs_P2: Tensor, now: ScheduleValues, draws: torch.Generator
    ) -> dict[str, Tensor]:
        """Return the chosen terms of the Donsker-Varadhan estimate, averaged over this rank's pairs.

        docs/choices.md, 2 and 7.
        """
        negatives = 0 if self.config.terms == "lhs" else self.config.negatives
        partners = Partners.of(labels_B, self.memory) if negatives else None
        (compared,) = self.comparisons(features, labels_B, partners, [pairs_P2], now, [draws])
        log_f_XB, num_joint = self.clipped(self.logits(compared)), compared.plan.num_joint
        if partners is None:
            return {"lhs": log_f_XB.mean()}
        terms = {}
        if self.config.terms == "both":
            terms["lhs"] = log_f_XB[:num_joint].mean()
        # If no input has a partner, the term is 0. Filling with -inf would turn the gradient into NaN.
        own, found_B = self.division.own(len(pairs_P2)), partners.found_B
        product_PXB = log_f_XB[num_joint:].unflatten(0, (own.stop - own.start, -1)).masked_fill(~found_B, -1e4)
        count = (found_B.sum() * product_PXB.shape[1]).clamp_min(1)
        log_mean_P = product_PXB.flatten(1).logsumexp(1) - count.log()
        terms["rhs"] = -log_mean_P.mean() * found_B.any()
        return terms

    def clipped(self, logits: Tensor) -> Tensor:
        return self.config.tau * torch.tanh(logits / self.config.tau)

    def learn(
        self, optimizer: torch.optim.Optimizer, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> dict[str, Tensor]:
        """Run Step 3: num_steps steps of w, each on new samples and partners. Then write the batch to the memory."""
        seeds = [seed_for(self.seed, "discriminator", *key, step) for step in range(self.config.num_steps)]
        if self.config.graph and labels_B.is_cuda:
            self.recorded = self.recorded or Recorded(partial(self.take_steps, optimizer))
            return self.recorded(features, labels_B, now, seeds)
        draws = [torch.Generator(labels_B.device).manual_seed(seed) for seed in seeds]
        return self.take_steps(optimizer, features, labels_B, now, draws)

    def take_steps(
        self,
        optimizer: torch.optim.Optimizer,
        features: Features,
        labels_B: Tensor,
        now: ScheduleValues,
        draws: Sequence[torch.Generator],
    ) -> dict[str, Tensor]:
        """Take one learning step for each generator, then write the batch to the memory."""
        labels_B = self.classes(labels_B)
        pairs = [within_budget(self.pairs_P2, self.config.budget, own) for own in draws]
        partners = Partners.of(labels_B, self.memory)
        targets_X1, weights_XB = self.targets(partners.found_B, len(pairs[0]))
        for compared in self.comparisons(features, labels_B, partners, pairs, now, draws):
            optimizer.zero_grad(set_to_none=True)
            logits_XB = self.differentiate(compared, targets_X1, weights_XB)
            self.division.sum_gradients([*self.network.parameters()])
            optimizer.step()
        self.memory.write(features.means_MBD, features.scales_MBD, labels_B)
        right_XB = (logits_XB > 0) == (targets_X1 > 0)
        targets_XB = targets_X1.expand_as(logits_XB)
        loss = F.binary_cross_entropy_with_logits(logits_XB, targets_XB, weights_XB, reduction="sum")
        return {
            "discriminator/loss": times(self.division.ranks, loss),
            "discriminator/accuracy": times(self.division.ranks, (right_XB * weights_XB).sum()),
            "discriminator/without_partner": (~partners.found_B).sum(),
        }

    def targets(self, found_B: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Return targets, 1 for joint and 0 for product rows; and weights, 0 for product rows without a partner.

        The weights of all pairs add up to 1. The weights of this rank's pairs add up to their fraction.
        """
        own, num_samples = self.division.own(num_pairs), self.config.num_samples
        joint = (own.stop - own.start) * num_samples
        rows = joint * (1 + self.config.negatives)
        weights_XB = self.network.first_bias.new_ones(rows, len(found_B))
        targets_X1 = weights_XB.new_zeros(rows, 1)
        targets_X1[:joint] = 1
        weights_XB[joint:] = found_B
        return targets_X1, times(self.fraction(num_pairs), weights_XB / weights_XB.sum())

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer of w; in a CUDA graph it keeps its counters on the GPU."""
        recorded = self.config.graph and self.network.first_bias.is_cuda
        return torch.optim.RMSprop(self.network.parameters(), lr=self.config.lr, foreach=True, capturable=recorded)

    def differentiate(self, compared: Comparison, targets_X1: Tensor, weights_XB: Tensor) -> Tensor:
        """Accumulate the gradients of the loss of equation 3 in w, and return w's logits."""
        if self.in_blocks and compared.stays_YBH.device.type == "cpu":
            of_class, second, third, plan = compared.of_class, self.network.second, self.network.third, compared.plan
            inputs = (
                compared.stays_YBH, compared.moves_ZBH, of_class.second_BH, second.weight, third.weight, third.bias,
                of_class.last_BL, of_class.last_B,
            )  # fmt: skip
            logits_XB, gradients = blockwise_gradients(*inputs, plan.first_X, plan.second_X, targets_X1, weights_XB)
            torch.autograd.backward(inputs, gradients)
            return logits_XB
        logits_XB = to_float32(self.logits(compared))
        found_XB = logits_XB.detach()
        logits_XB.backward((found_XB.sigmoid() - targets_X1) * weights_XB)
        return found_XB

    def logits(self, compared: Comparison) -> Tensor:
        plan, stays_YBH, moves_ZBH = compared.plan, compared.stays_YBH, compared.moves_ZBH
        first_XBH = stays_YBH.index_select(0, plan.first_X) + moves_ZBH.index_select(0, plan.second_X)
        return self.network.logits(first_XBH, compared.of_class)

    def comparisons(
        self,
        features: Features,
        labels_B: Tensor,
        partners: Partners | None,
        pairs: Sequence[Tensor],
        now: ScheduleValues,
        draws: Sequence[torch.Generator],
    ) -> Iterator[Comparison]:
        """Yield one comparison for each generator, with the pairs of members that belong to it.

        All random numbers are drawn first. The first layer is applied once to each sample of z when the caller takes a
        comparison, with the weights of w at that time. partners: None if there are no product pairs.
        """
        negatives, num_samples = self.config.negatives if partners else 0, self.config.num_samples
        means_MSBD = features.means_MBD[:, None].expand(-1, num_samples, -1, -1)
        drawn = [self.draw(means_MSBD, len(pairs[0]), negatives, own) for own in draws]
        plans = self.plans(pairs, negatives, drawn)
        scales = features.scales_MBD
        if partners is not None:
            pool_MQD, scales = self.memory.with_batch(features.means_MBD, scales)
            rows_TXB = partners.rows(torch.cat([own.chance_BX for own in drawn], 1)).unflatten(0, (len(drawn), -1))
        deviation = self.deviation(scales, now)
        own_deviation = None if deviation is None else deviation[:, None, : len(labels_B)]
        for nth, plan in enumerate(plans):
            z_MXBD = noisy(means_MSBD, drawn[nth].noise_MSBD, own_deviation)
            if partners is not None:
                their_means, their_deviation = (taken(of, rows_TXB[nth]) for of in (pool_MQD, deviation))
                assert their_means is not None
                z_MXBD = torch.cat([z_MXBD, noisy(their_means, drawn[nth].noise_MXBD, their_deviation)], dim=1)
            of_class = self.network.of_class(labels_B)
            first_MXBH = self.network.project(z_MXBD)
            stays_MSBH = first_MXBH[:, :num_samples] + of_class.first_BH
            yield Comparison(stays_MSBH.flatten(0, 1), first_MXBH.flatten(0, 1), plan, of_class)

    def draw(self, means_MSBD: Tensor, num_pairs: int, negatives: int, draws: torch.Generator) -> Drawn:
        """Draw the random numbers of one comparison on the generator's device. Their order must never change."""
        (members, samples, batch, features), device = means_MSBD.shape, means_MSBD.device

        def noise(samples: int) -> Tensor | None:
            if self.config.scale == "none":
                return None
            drawn = torch.randn(members, samples, batch, features, generator=draws, device=draws.device).to(device)
            return drawn if isinstance(self.config.scale, str) else drawn * self.config.scale

        own, others = noise(samples), samples * negatives
        if not negatives:
            return Drawn(own)
        chance_BX = torch.rand(batch, others, generator=draws, device=draws.device)
        theirs = noise(others)
        moved_PSR = torch.randint(2, (num_pairs, samples, negatives), generator=draws, device=draws.device)
        return Drawn(own, chance_BX.to(device), theirs, moved_PSR.to(device))

    def plans(self, pairs: Sequence[Tensor], negatives: int, drawn: Sequence[Drawn]) -> list[PairPlan]:
        """Return this rank's plan for each draw."""
        own = self.division.own(len(pairs[0]))
        tables = [self.table(each, negatives) for each in pairs]
        if not negatives:
            return [table.joint(own) for table in tables]
        if all(table is tables[0] for table in tables):
            return tables[0].plans(torch.stack([each.moved_PSR for each in drawn]), own)
        return [table.plans(each.moved_PSR[None], own)[0] for table, each in zip(tables, drawn, strict=True)]

    def table(self, pairs_P2: Tensor, negatives: int) -> PairTable:
        """Return the table of these pairs. The table of all pairs is cached; a budget draws new pairs every time."""
        known = self.tables.get(negatives)
        if known is not None and pairs_P2 is self.pairs_P2 and known.joint_2PS.device == pairs_P2.device:
            return known
        made = PairTable.of(pairs_P2, self.config.num_samples, negatives)
        if pairs_P2 is self.pairs_P2:
            self.tables[negatives] = made
        return made

    def deviation(self, scales: Tensor, now: ScheduleValues) -> Tensor | None:
        """Return the deviation of the noise on z, scheduled from 1 to the predicted scale; None: noise as drawn."""
        if not self.config.reads_scale:
            return None
        floored = scales.clamp_min(self.config.floor) if self.config.floor else scales
        return 1 + now.covariance * (floored - 1)

    def classes(self, labels_B: Tensor) -> Tensor:
        return labels_B if self.conditional else torch.zeros_like(labels_B)


def noisy(means: Tensor, noise: Tensor | None, deviation: Tensor | None) -> Tensor:
    if noise is None:
        return means
    return means + (noise if deviation is None else noise * deviation)


def taken(values_MQD: Tensor | None, rows_XB: Tensor) -> Tensor | None:
    """Return the rows [M, X, B, D] of each member."""
    if values_MQD is None:
        return None
    return values_MQD.index_select(1, rows_XB.flatten()).unflatten(1, rows_XB.shape)
