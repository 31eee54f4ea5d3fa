"""The features that the discriminator compares: pairs of members, and partners of the same class for product pairs.

Legend: M members, B inputs of a batch, C memory entries a class, X draws, P pairs of members, S samples, R product
pairs per joint pair.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from dicedist.algorithm.memory import ClassMemory


def pairs_of(num_members: int) -> Tensor:
    """Return every pair of members. The footprint needs meta tensors, which torch.combinations lacks in torch 2.10."""
    return torch.tensor(list(combinations(range(num_members), 2)), dtype=torch.int64).reshape(-1, 2)


def within_budget(pairs_P2: Tensor, budget: int | None, generator: torch.Generator) -> Tensor:
    """Return all pairs of members, or as many as the budget allows, drawn at random."""
    if budget is None or budget >= len(pairs_P2):
        return pairs_P2
    return pairs_P2[torch.randperm(len(pairs_P2), generator=generator, device=generator.device)[:budget]]


@dataclass(frozen=True)
class Partners:
    """For each input of a batch, the other inputs of its class: in the batch and in the memory."""

    ranks_BN: Tensor  # cumulative count of candidates over the batch's B inputs, then the C entries of the class
    found_B: Tensor  # true for inputs with at least one candidate
    skipped_B1: Tensor  # memory rows of other classes between the batch's rows and the rows of the class

    @classmethod
    def of(cls, labels_B: Tensor, memory: ClassMemory) -> "Partners":
        same_BB = labels_B[:, None] == labels_B
        same_BB.fill_diagonal_(False)
        entries_C = torch.arange(memory.capacity, device=labels_B.device)
        filled_BC = entries_C < memory.written_K[labels_B, None]
        ranks_BN = torch.cat([same_BB, filled_BC], dim=1).cumsum(1)
        return cls(ranks_BN, ranks_BN[:, -1] > 0, labels_B[:, None] * memory.capacity)

    def rows(self, chance_BX: Tensor) -> Tensor:
        """Turn chances in 0..1 into rows [X, B] of batch and memory concatenated, uniform over candidates.

        The rows of inputs without candidates are arbitrary.
        """
        batch, count_B1 = len(self.ranks_BN), self.ranks_BN[:, -1:]
        before_BX = torch.minimum((chance_BX * count_B1).long(), count_B1 - 1)
        found_BX = torch.searchsorted(self.ranks_BN, before_BX, right=True)
        return torch.where(found_BX < batch, found_BX, self.skipped_B1 + found_BX).T.contiguous()


@dataclass(frozen=True)
class PairPlan:
    """Indices of the projected features to add: both of one input (joint), or one of its partner (product).

    `first` indexes the batch's samples, [M, S] flattened. `second` indexes [M, S + S R] flattened, where each member's
    partners follow its samples.
    """

    first_X: Tensor
    second_X: Tensor
    num_joint: int


@dataclass(frozen=True)
class PairTable:
    """The plans of some pairs of members, before the draw of the member that takes its features from the partner."""

    joint_2PS: Tensor  # rows of `first` and `second`
    stays_2PSR: Tensor  # rows of the product pairs if the first member of a pair moves
    shift_2P: Tensor  # added to these rows if the second member moves

    @classmethod
    def of(cls, pairs_P2: Tensor, num_samples: int, negatives: int) -> "PairTable":
        rows = num_samples * (1 + negatives)  # per member in `second`
        one_P1, other_P1 = pairs_P2.split(1, dim=1)
        samples_S, drawn_SR = torch.arange(rows, device=pairs_P2.device).split([num_samples, rows - num_samples])
        own_PS, partner_PX = other_P1 * num_samples + samples_S, one_P1 * rows + drawn_SR
        return cls(
            torch.stack([one_P1 * num_samples + samples_S, other_P1 * rows + samples_S]),
            torch.stack([own_PS.repeat_interleave(negatives, 1), partner_PX]).unflatten(2, (num_samples, negatives)),
            torch.stack([(one_P1 - other_P1) * num_samples, (other_P1 - one_P1) * rows])[..., 0],
        )

    def joint(self, own: slice) -> PairPlan:
        """Return the plan of the joint pairs only, for this rank's pairs."""
        first_X, second_X = self.joint_2PS[:, own].flatten(1)
        return PairPlan(first_X, second_X, len(first_X))

    def plans(self, moved_TPSR: Tensor, own: slice) -> list[PairPlan]:
        """Return a plan for each draw, for this rank's pairs.

        moved: 0 or 1, the place in its pair of the member that moves, drawn at random (docs/choices.md, 12).
        """
        joint_2X, shift_2PSR = self.joint_2PS[:, own].flatten(1), self.shift_2P[:, own, None, None]
        product_T2X = (self.stays_2PSR[:, own] + moved_TPSR[:, None, own] * shift_2PSR).flatten(2)
        rows_T2X = torch.cat([joint_2X.expand(len(moved_TPSR), -1, -1), product_T2X], dim=2)
        return [PairPlan(first_X, second_X, joint_2X.shape[1]) for first_X, second_X in rows_T2X]
