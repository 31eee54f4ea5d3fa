"""Online knowledge distillation with diverse peers (Chen et al., 2020): an attention among peers, and a student.

With peers a, b = 1..M-1 and the student M:
sum CE + r [sum_a KD(z_a <- sum_b A_ab z_b) + KD(z_M <- mean_a z_a)], A_ab = softmax_b <q(h_a), k(h_b)>, where q and k
are dense layers from D to D/8 without bias, shared by the peers. As in the authors' code, no teacher is held constant,
so a peer also moves towards those that it teaches. Where features are sampled (CEB, DICE), h is their mean.

Legend: M members, B inputs, D features, K classes, A and C peers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dicedist.algorithm.member import Encoding
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import Fields, View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.schedules import Moment

REDUCTION = 8


class Term(Distillation):
    follows = ("ramp_up",)
    student = True
    least = 3

    def check(self, networks: Sequence[Network]) -> None:
        dims = {network.feature_dim for network in networks[:-1]}
        if len(dims) > 1:
            raise ValueError(
                f"the attention among peers needs the same number of features D in each, not {sorted(dims)}: "
                "leave out network.per_member, or let only the last member (the student) differ"
            )

    def shared(self, networks: Sequence[Network]) -> dict[str, nn.Module]:
        feature_dim = networks[0].feature_dim
        return {name: nn.Linear(feature_dim, reduced(feature_dim), bias=False) for name in ("query", "key")}

    def hears(self, listener: int, speaker: int, num_members: int) -> tuple[str, ...]:
        return ("logits",) if num_members - 1 in (listener, speaker) else ("logits", "query", "key")

    def fields(self, index: int, num_members: int, own: Encoding, shared: nn.ModuleDict | None) -> Fields:
        assert shared is not None
        return {} if index == num_members - 1 else {name: shared[name](own.mean_BD) for name in ("query", "key")}

    def widths(self, feature_dims: Sequence[int]) -> dict[str, list[int]]:
        return {name: [reduced(feature_dim) for feature_dim in feature_dims] for name in ("query", "key")}

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        student = view.num_members - 1
        peers_ABK = view.rows("logits", range(student))
        loss = self.distil(view.fields[student]["logits"], peers_ABK.mean(0))
        if view.index != student:
            queries_ABD, keys_ABD = (view.rows(name, range(student)) for name in ("query", "key"))
            attention_BAC = torch.einsum("abd,cbd->bac", queries_ABD, keys_ABD).softmax(-1)
            loss = loss + self.distil(peers_ABK, torch.einsum("bac,cbk->abk", attention_BAC, peers_ABK))
        return {"distillation": now.ramp_up * loss}


def reduced(feature_dim: int) -> int:
    return max(1, feature_dim // REDUCTION)
