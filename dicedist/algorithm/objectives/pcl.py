"""Peer collaborative learning (Wu and Gong, 2021): branches learn from a fused teacher and from their peers' averages.

CE(z_e) + sum_i [CE_i + r KD(z_i <- z_e) + r mean over j != i of KD(z_i <- z~_j)]. z_e = W [h_1; ...; h_M] + b is one
dense layer on all branches' features, held constant as a teacher. z~_j are the logits of the moving average of trunk
and branch j, on the view of branch j. Member i computes and sends its own share W_i h_i + b/M of z_e, not its features.
So the sum over members is also the whole gradient of b. The source is public code that is not the authors'. As there,
averages normalize by the batch in training. Their running statistics are averaged like the weights; in that code the
averaged network collects its own.

Legend: M members, B inputs, D features, K classes.
"""

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.batch import Views
from dicedist.algorithm.member import Encoding, to_float32
from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.networks.batch_norm import statistics_untouched
from dicedist.algorithm.networks.freezing import frozen_norms, to_training
from dicedist.algorithm.objectives import FusedHead, View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.probes import Probe
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import Config


class Fusion(nn.Module):
    def __init__(self, feature_dims: Sequence[int], num_classes: int):
        super().__init__()
        self.feature_dims = list(feature_dims)
        self.dense = nn.Linear(sum(feature_dims), num_classes)

    def share(self, features_BD: Tensor, member: int) -> Tensor:
        """Return the member's share of the fused logits."""
        first = sum(self.feature_dims[:member])
        weight_KD = self.dense.weight[:, first : first + self.feature_dims[member]]
        return F.linear(features_BD, weight_KD, self.dense.bias / len(self.feature_dims))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        return torch.stack([self.share(own_BD, member) for member, own_BD in enumerate(features)]).sum(0)


class AveragedLogits(Probe):
    """The logits of the moving averages hosted here, normalized by the batch as the members themselves are."""

    @classmethod
    def check(cls, config: Config) -> None:
        if config.optimizer.ema is None:
            raise ValueError(f"method={config.method.name} teaches by averaged weights: write optimizer.ema=0.999")

    @torch.no_grad()
    def on_encodings(self, encodings: Mapping[int, Encoding], images: Views) -> None:
        averaged = self.hosted.averaged
        with contextlib.ExitStack() as stack:
            for part, followed in zip(averaged.of_members, self.hosted.of_members, strict=True):
                stack.enter_context(statistics_untouched(to_training(part.module, frozen_norms(followed.module))))
            inputs = images if averaged.trunk is None else images.map(averaged.trunk.module)
            for member, own in encodings.items():
                own.probed["averaged"] = to_float32(averaged.member(member)(inputs[member]))


class Term(Distillation):
    sends = ("share", "averaged")
    follows = ("ramp_up",)
    probes = (AveragedLogits,)

    def shared(self, networks: Sequence[Network], num_classes: int) -> dict[str, nn.Module]:
        return {"fusion": Fusion([network.feature_dim for network in networks], num_classes)}

    @classmethod
    def fused_head(cls) -> FusedHead:
        def build(sizes: Sequence[Sizes]) -> nn.Module:
            return Fusion([size.features for size in sizes], sizes[0].classes)

        return FusedHead("mean", "shared", "fusion", build)

    def fields(self, view: View) -> Fields:
        assert view.shared is not None
        fusion = view.shared["fusion"]
        assert isinstance(fusion, Fusion)
        return {"share": fusion.share(view.own.mean_BD, view.index), "averaged": view.own.probed["averaged"]}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {name: [size.classes for size in sizes] for name in ("share", "averaged")}

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        fused_BK = view.rows("share").sum(0)
        others = [member for member in range(view.num_members) if member != view.index]
        peers_PBK = view.rows("averaged", others)
        among = self.distil(view.own.logits_BK.expand_as(peers_PBK), peers_PBK) / len(others)
        return {
            "ensemble_cross_entropy": view.targets.cross_entropy(fused_BK),
            "distillation": now.ramp_up * self.distil(view.own.logits_BK, fused_BK.detach()),
            "peers": now.ramp_up * among,
        }
