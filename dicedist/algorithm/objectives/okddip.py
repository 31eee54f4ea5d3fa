"""Online knowledge distillation with diverse peers (Chen et al., 2020): an attention among peers, and a student.

With peers a, b = 1..M-1 and the student M:
sum CE + r [sum_a KD(z_a <- sum_b A_ab z_b) + KD(z_M <- mean_a z_a)], A_ab = softmax_b <q(h_a), k(h_b)>, where q and k
are dense layers from D to D/8 without bias, shared by the peers. As in the authors' code, no teacher is held constant,
so a peer also moves towards the peers that it teaches. If features are sampled (CEB, DICE), h is their mean.
Without a leader (OKDDip-E, which is used as an ensemble) there is no student: all M members are peers.

Legend: M members, B inputs, D features, K classes, A and C peers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import Config

REDUCTION = 8


class Term(Distillation):
    follows = ("ramp_up",)

    def __init__(self, temperature: float, leader: bool = True):
        super().__init__(temperature)
        self.leader, self.min_members = leader, 3 if leader else 2

    def student(self, num_members: int) -> int | None:
        return num_members - 1 if self.leader else None

    def peers(self, num_members: int) -> range:
        return range(num_members - self.leader)

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        dims = {networks[peer].feature_dim for peer in self.peers(len(networks))}
        if len(dims) > 1:
            raise ValueError(
                f"the attention among peers needs the same number of features D in each, not {sorted(dims)}: "
                "leave out network.per_member, or let only the last member (the student) differ"
            )

    def shared(self, networks: Sequence[Network], num_classes: int) -> dict[str, nn.Module]:
        feature_dim = networks[0].feature_dim
        return {name: nn.Linear(feature_dim, reduced(feature_dim), bias=False) for name in ("query", "key")}

    def receives(self, receiver: int, sender: int, num_members: int) -> tuple[str, ...]:
        both_peers = {receiver, sender} <= set(self.peers(num_members))
        return ("logits", "query", "key") if both_peers else ("logits",)

    def fields(self, view: View) -> Fields:
        shared = view.shared
        assert shared is not None
        is_peer = view.index in self.peers(view.num_members)
        return {name: shared[name](view.own.mean_BD) for name in ("query", "key")} if is_peer else {}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {name: [reduced(size.features) for size in sizes] for name in ("query", "key")}

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        peers = self.peers(view.num_members)
        peers_ABK = view.rows("logits", peers)
        losses = []
        if self.leader:
            losses.append(self.distil(view.fields[view.num_members - 1]["logits"], peers_ABK.mean(0)))
        if view.index in peers:
            attended_ABK = attended(peers_ABK, view.rows("query", peers), view.rows("key", peers))
            losses.append(self.distil(peers_ABK, attended_ABK))
        return {"distillation": now.ramp_up * torch.stack(losses).sum()}


def attended(peers_ABK: Tensor, queries_ABD: Tensor, keys_ABD: Tensor) -> Tensor:
    """Return the teacher of each peer: sum_b A_ab z_b."""
    attention_BAC = torch.einsum("abd,cbd->bac", queries_ABD, keys_ABD).softmax(-1)
    return torch.einsum("bac,cbk->abk", attention_BAC, peers_ABK)


def reduced(feature_dim: int) -> int:
    return max(1, feature_dim // REDUCTION)
