"""The discriminator w: tells features of one input from features of two inputs of the same class.

The input of the paper's network is M slots side by side, one per member, all but two filled with zeros. An embedding of
the class enters its first two layers, and it has one output per class. This module computes the same function without
the zeros: each slot's part of the first layer is applied once to its member's features, and the results are added per
pair; the embedding acts as a table with one row per class; only the output of the input's class is computed.
tests/algorithm1.py has the literal network.

Legend: M members, B inputs, D features, K classes, S samples, R product pairs per joint pair, P pairs of members, X
rows, H hidden.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.batch import StepKey
from dicedist.algorithm.blockwise import SLOPE, blockwise_gradients
from dicedist.algorithm.counterpart import Adversary, Features
from dicedist.algorithm.memory import ClassMemory
from dicedist.algorithm.pairs import PairPlan, Partners, pairs_of, within_budget
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import RedundancyConfig

EMBEDDING, HIDDEN, LAST = 64, 256, 100


class PairClassifier(nn.Module):
    """The network of w. Unconditional redundancy uses it with a single class and no embedding."""

    def __init__(self, num_members: int, feature_dim: int, num_classes: int):
        super().__init__()
        embedding = EMBEDDING if num_classes > 1 else 0
        self.slots_MDH = nn.Parameter(torch.empty(num_members, feature_dim, HIDDEN))
        self.embedding_KE = nn.Parameter(torch.empty(num_classes, embedding))
        self.embedding_first_EH = nn.Parameter(torch.empty(embedding, HIDDEN))
        self.first_bias = nn.Parameter(torch.empty(HIDDEN))
        self.embedding_second_EH = nn.Parameter(torch.empty(embedding, HIDDEN))
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.third = nn.Linear(HIDDEN, LAST)
        self.last = nn.Linear(LAST, num_classes)
        self.initialise(num_members * feature_dim + embedding, HIDDEN + embedding)

    def initialise(self, first_inputs: int, second_inputs: int) -> None:
        """Draws weights as torch.nn.Linear and Embedding would for the literal layers."""
        first, second = 1 / math.sqrt(first_inputs), 1 / math.sqrt(second_inputs)
        for parameter in (self.slots_MDH, self.embedding_first_EH, self.first_bias):
            nn.init.uniform_(parameter, -first, first)
        for tensor in (self.embedding_second_EH, self.second.weight, self.second.bias):
            nn.init.uniform_(tensor, -second, second)
        nn.init.normal_(self.embedding_KE)

    def project(self, z_MBD: Tensor) -> Tensor:
        """Each member's part of the first layer; any number of dimensions may lie between M and D."""
        return torch.bmm(z_MBD.flatten(1, -2), self.slots_MDH).unflatten(1, z_MBD.shape[1:-1])

    def of_class(self, labels_B: Tensor) -> "ClassRows":
        """The parts of the layers that depend on the class of each input."""
        first_KH = self.embedding_KE @ self.embedding_first_EH + self.first_bias
        second_KH = self.embedding_KE @ self.embedding_second_EH + self.second.bias
        return ClassRows(first_KH[labels_B], second_KH[labels_B], self.last.weight[labels_B], self.last.bias[labels_B])

    def logits(self, first_XBH: Tensor, of_class: "ClassRows") -> Tensor:
        """log f = log w/(1-w) for rows of first-layer sums."""
        hidden = F.leaky_relu(first_XBH, SLOPE)
        hidden = F.leaky_relu(hidden @ self.second.weight.T + of_class.second_BH, SLOPE)
        hidden = F.leaky_relu(self.third(hidden), SLOPE)
        return torch.einsum("xbl,bl->xb", hidden, of_class.last_BL) + of_class.last_B

    def independence(self, means_MBD: Tensor, labels_B: Tensor, pairs_P2: Tensor) -> Tensor:
        """Mean over pairs of 1 - w(z_i, z_j, y) with z = means: low where features are redundant.

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
    found_B: Tensor  # which inputs have a partner
    fraction: float  # of all compared pairs

    def targets(self) -> tuple[Tensor, Tensor]:
        """Targets, 1 for joint and 0 for product rows; and weights, 0 for product rows of inputs without a partner.

        The weights of all pairs add up to 1, those of these pairs to their fraction.
        """
        targets_XB = self.stays_YBH.new_zeros(len(self.plan.first_X), len(self.found_B))
        targets_XB[: self.plan.num_joint] = 1
        weights_XB = torch.ones_like(targets_XB)
        weights_XB[self.plan.num_joint :] = self.found_B.to(weights_XB.dtype)
        return targets_XB, weights_XB / weights_XB.sum() * self.fraction


class Discriminator(Adversary):
    """w and the class memory: Steps 2 and 3 of Algorithm 1.

    Ranks that divide it (redundancy.ranks) compare some pairs of members each. Their draws are those of a single rank,
    and their gradients of w are added in every learning step, so their copies of w and of the memory stay equal.
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
        self.network = PairClassifier(num_members, feature_dim, self.num_classes)
        self.memory = ClassMemory(num_members, feature_dim, self.num_classes, config.memory)
        self.register_buffer("pairs_P2", pairs_of(num_members), persistent=False)

    @property
    def weights(self) -> nn.Module:
        """w without its class memory."""
        return self.network

    def redundancy_gradients(
        self, features: Features, labels_B: Tensor, now: ScheduleValues, key: StepKey
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """d(redundancy loss)/d(means) [M, B, D]; the scales get no gradient (docs/choices.md, 9)."""
        draws = generator(labels_B.device, self.seed, "redundancy", *key)
        labels_B = self.classes(labels_B)
        means_MBD = features.means_MBD.detach().requires_grad_()
        pairs_P2 = within_budget(self.pairs_P2, self.config.budget, draws)
        terms = self.redundancy(means_MBD, features.scales_MBD, labels_B, pairs_P2, now, draws)
        estimate = torch.stack(list(terms.values())).sum() * self.fraction(len(pairs_P2))
        (gradients_MBD,) = torch.autograd.grad(self.weight(now) * estimate, means_MBD)
        # w sees R product pairs to a joint one, so f is the density ratio over R; in both terms together R cancels.
        shift = {"lhs": 1, "rhs": -1, "both": 0}[self.config.terms] * math.log(self.config.negatives)
        whole = estimate.detach() * self.division.ranks  # in the mean over ranks
        return gradients_MBD, {"redundancy": whole, "redundancy_nats": whole + shift}

    def fraction(self, num_pairs: int) -> float:
        """This rank's share of so many pairs."""
        own = self.division.own(num_pairs)
        return (own.stop - own.start) / num_pairs

    def weight(self, now: ScheduleValues) -> float:
        """The weight of the mean over pairs: delta / (M - 1) for each pair, with the ramp-up."""
        return self.delta * now.ramp_up / (self.num_members - 1) * len(self.pairs_P2)

    def redundancy(
        self,
        means_MBD: Tensor,
        scales_MBD: Tensor,
        labels_B: Tensor,
        pairs_P2: Tensor,
        now: ScheduleValues,
        draws: torch.Generator,
    ) -> dict[str, Tensor]:
        """The chosen terms of the Donsker-Varadhan estimate, averaged over own pairs (docs/choices.md, 2 and 7)."""
        negatives = 0 if self.config.terms == "lhs" else self.config.negatives
        compared = self.compare(means_MBD, scales_MBD, labels_B, pairs_P2, negatives, now, draws)
        log_f_XB = self.clipped(self.logits(compared))
        num_joint, found_B = compared.plan.num_joint, compared.found_B
        terms = {}
        if self.config.terms != "rhs":
            terms["lhs"] = log_f_XB[:num_joint].mean()
        if self.config.terms != "lhs":
            # If no input has a partner, the term is 0. Filling with -inf would turn the gradient into NaN.
            own = self.division.own(len(pairs_P2))
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
        """Step 3: num_steps steps of w, each on new samples and partners; then the batch is written to the memory."""
        labels_B = self.classes(labels_B)
        for step in range(self.config.num_steps):
            draws = generator(labels_B.device, self.seed, "discriminator", *key, step)
            pairs_P2 = within_budget(self.pairs_P2, self.config.budget, draws)
            compared = self.compare(
                features.means_MBD, features.scales_MBD, labels_B, pairs_P2, self.config.negatives, now, draws
            )
            targets_XB, weights_XB = compared.targets()
            optimizer.zero_grad(set_to_none=True)
            loss, logits_XB = self.differentiate(compared, targets_XB, weights_XB)
            self.division.sum_gradients([*self.network.parameters()])
            optimizer.step()
        self.memory.write(features.means_MBD, features.scales_MBD, labels_B)
        right_XB = (logits_XB > 0) == (targets_XB > 0)
        return {
            "discriminator/loss": loss * self.division.ranks,
            "discriminator/accuracy": (right_XB * weights_XB).sum() * self.division.ranks,
            "discriminator/without_partner": (~compared.found_B).sum(),
        }

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.network.parameters(), lr=self.config.lr)

    def differentiate(self, compared: Comparison, targets_XB: Tensor, weights_XB: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of equation 3, and w's logits; accumulates the gradients of w."""
        if compared.stays_YBH.device.type == "cpu":
            of_class, second, third, plan = compared.of_class, self.network.second, self.network.third, compared.plan
            inputs = (
                compared.stays_YBH, compared.moves_ZBH, of_class.second_BH, second.weight, third.weight, third.bias,
                of_class.last_BL, of_class.last_B,
            )  # fmt: skip
            logits_XB, gradients = blockwise_gradients(*inputs, plan.first_X, plan.second_X, targets_XB, weights_XB)
            torch.autograd.backward(inputs, gradients)
        else:
            logits_XB = self.logits(compared)
            self.cross_entropy(logits_XB, targets_XB, weights_XB).backward()
        logits_XB = logits_XB.detach()
        return self.cross_entropy(logits_XB, targets_XB, weights_XB), logits_XB

    @staticmethod
    def cross_entropy(logits_XB: Tensor, targets_XB: Tensor, weights_XB: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits_XB, targets_XB, weights_XB, reduction="sum")

    def logits(self, compared: Comparison) -> Tensor:
        first_XBH = compared.stays_YBH[compared.plan.first_X] + compared.moves_ZBH[compared.plan.second_X]
        return self.network.logits(first_XBH, compared.of_class)

    def compare(
        self,
        means_MBD: Tensor,
        scales_MBD: Tensor,
        labels_B: Tensor,
        pairs_P2: Tensor,
        negatives: int,
        now: ScheduleValues,
        draws: torch.Generator,
    ) -> Comparison:
        """Draw samples of z and partners for product pairs, and apply the first layer once to each of them."""
        num_samples = self.config.num_samples
        z_MXBD = self.sample(means_MBD, scales_MBD, num_samples, now, draws)
        partners = Partners.of(labels_B, self.memory)
        if negatives:
            rows_XB = partners.draw(num_samples * negatives, draws)
            pool_MQD, pool_scales_MQD = self.memory.with_batch(means_MBD, scales_MBD)
            others_MXBD = self.sample(pool_MQD[:, rows_XB], pool_scales_MQD[:, rows_XB], None, now, draws)
            z_MXBD = torch.cat([z_MXBD, others_MXBD], dim=1)
        plan = PairPlan.draw(pairs_P2, num_samples, negatives, draws)
        plan = plan.of_pairs(self.division.own(len(pairs_P2)), len(pairs_P2))
        of_class = self.network.of_class(labels_B)
        first_MXBH = self.network.project(z_MXBD)
        stays_MSBH = first_MXBH[:, :num_samples] + of_class.first_BH
        found_B, fraction = partners.found_B, self.fraction(len(pairs_P2))
        return Comparison(stays_MSBH.flatten(0, 1), first_MXBH.flatten(0, 1), plan, of_class, found_B, fraction)

    def sample(
        self, means: Tensor, scales: Tensor, num_samples: int | None, now: ScheduleValues, draws: torch.Generator
    ) -> Tensor:
        """z of [M, ..., D]; with num_samples, [M, S, ..., D]. Over time the scale goes from 1 to the predicted one."""
        if num_samples is not None:
            means, scales = (values[:, None].expand(-1, num_samples, *values.shape[1:]) for values in (means, scales))
        if self.config.scale == "none":
            return means
        noise = torch.randn(means.shape, generator=draws, device=draws.device)
        if self.config.reads_scale:
            floored = scales.clamp_min(self.config.floor) if self.config.floor else scales
            noise = noise * (1 + now.covariance * (floored - 1))
        elif not isinstance(self.config.scale, str):
            noise = noise * self.config.scale
        return means + noise

    def classes(self, labels_B: Tensor) -> Tensor:
        return labels_B if self.conditional else torch.zeros_like(labels_B)
