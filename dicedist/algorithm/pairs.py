"""Which features the discriminator compares: pairs of members, and for product pairs another input of the same class.

Legend: M members, B inputs of a batch, C memory entries a class, X draws, P pairs of members, S samples, R product
pairs per joint pair.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from dicedist.algorithm.memory import ClassMemory


def pairs_of(num_members: int) -> Tensor:
    """Return every pair of members. torch.combinations has no meta kernel in torch 2.10, where memory is counted."""
    return torch.tensor(list(combinations(range(num_members), 2)), dtype=torch.int64).reshape(-1, 2)


def within_budget(pairs_P2: Tensor, budget: int | None, generator: torch.Generator) -> Tensor:
    """All pairs of members, or as many as the budget allows, drawn at random."""
    if budget is None or budget >= len(pairs_P2):
        return pairs_P2
    return pairs_P2[torch.randperm(len(pairs_P2), generator=generator, device=generator.device)[:budget]]


@dataclass(frozen=True)
class Partners:
    """For each input of a batch, the other inputs of its class: in the batch and in the memory."""

    ranks_BN: Tensor  # cumulative count of candidates over the batch's B inputs, then the C entries of the class
    memory_row_B: Tensor  # the first memory row of the class, with memory rows numbered after the batch's

    @classmethod
    def of(cls, labels_B: Tensor, memory: ClassMemory) -> "Partners":
        batch = len(labels_B)
        same_BB = labels_B[:, None] == labels_B
        same_BB.fill_diagonal_(False)
        entries_C = torch.arange(memory.capacity, device=labels_B.device)
        filled_BC = entries_C < memory.written_K[labels_B, None]
        ranks_BN = torch.cat([same_BB, filled_BC], dim=1).cumsum(1)
        return cls(ranks_BN, batch + labels_B * memory.capacity)

    @property
    def found_B(self) -> Tensor:
        return self.ranks_BN[:, -1] > 0

    def draw(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Rows [X, B] of batch and memory concatenated, uniform over candidates; meaningless where there are none."""
        batch = len(self.ranks_BN)
        chance_BX = torch.rand(batch, num_draws, generator=generator, device=generator.device)
        count_B1 = self.ranks_BN[:, -1:]
        nth_BX = torch.minimum((chance_BX * count_B1).long(), (count_B1 - 1).clamp_min(0)) + 1
        found_BX = torch.searchsorted(self.ranks_BN, nth_BX).clamp_max(self.ranks_BN.shape[1] - 1)
        rows_BX = torch.where(found_BX < batch, found_BX, self.memory_row_B[:, None] + found_BX - batch)
        return rows_BX.T


@dataclass(frozen=True)
class PairPlan:
    """Which projected features are added: both of one input (joint), or one of it and one of its partner (product).

    `first` indexes the batch's samples, [M, S] flattened. `second` indexes [M, S + S R] flattened, where each member's
    partners follow its samples.
    """

    first_X: Tensor
    second_X: Tensor
    num_joint: int

    @classmethod
    def draw(cls, pairs_P2: Tensor, num_samples: int, negatives: int, generator: torch.Generator) -> "PairPlan":
        device, rows = pairs_P2.device, num_samples * (1 + negatives)
        samples_S = torch.arange(num_samples, device=device)
        one_P1, other_P1 = pairs_P2.split(1, dim=1)
        # Which of the two members takes its features from the partner is random (docs/choices.md, 12).
        moved_PSR = torch.randint(
            2, (len(pairs_P2), num_samples, negatives), generator=generator, device=generator.device
        )
        stays_PSR = torch.gather(pairs_P2, 1, 1 - moved_PSR.flatten(1)).view_as(moved_PSR)
        moves_PSR = torch.gather(pairs_P2, 1, moved_PSR.flatten(1)).view_as(moved_PSR)
        draws_SR = samples_S[:, None] * negatives + torch.arange(negatives, device=device)
        own_PSR = stays_PSR * num_samples + samples_S[:, None]
        partner_PSR = moves_PSR * rows + num_samples + draws_SR
        return cls(
            torch.cat([(one_P1 * num_samples + samples_S).flatten(), own_PSR.flatten()]),
            torch.cat([(other_P1 * rows + samples_S).flatten(), partner_PSR.flatten()]),
            len(pairs_P2) * num_samples,
        )

    def of_pairs(self, chosen: slice, num_pairs: int) -> "PairPlan":
        """The rows of some of the pairs that it was drawn for."""
        if (chosen.start, chosen.stop) == (0, num_pairs):
            return self
        rows = [
            torch.cat([part.unflatten(0, (num_pairs, -1))[chosen].flatten() for part in self.halves(indices_X)])
            for indices_X in (self.first_X, self.second_X)
        ]
        return PairPlan(rows[0], rows[1], self.num_joint // num_pairs * (chosen.stop - chosen.start))

    def halves(self, indices_X: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor's joint rows, and its product rows."""
        return indices_X[: self.num_joint], indices_X[self.num_joint :]
