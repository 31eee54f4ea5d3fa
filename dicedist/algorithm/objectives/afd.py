"""Feature-map-level online adversarial distillation (Chung et al., 2020): nets in a ring imitate each other's maps.

Member i learns from member i-1, the first from the last. CE_i + r KD(z_i <- z_{i-1}) by the run's optimiser; and by a
second one, Adam, over the encoder alone, (1 - D_i(map_i))^2. D_i lives with member i and learns, after both, that the
peer's map is real and the member's own fake: (1 - D_i(map_{i-1}))^2 + D_i(map_i)^2, by Adam too. Peers are constant,
and both gradients of a member are taken at the same weights. Loss and cycle are those on which third-party descriptions
agree; the optimisers, their schedule and the kinds of layers of D are recalled, not read; its sizes, that logits go
round the same ring, and that D learns last are decided here. There is no code of the authors.

Legend: B inputs, C channels, H rows, W columns, X = C H W.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dicedist.algorithm.companion import Companion
from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._maps import MapShape, OnMaps, map_shapes, unflattened
from dicedist.algorithm.optimizers import RATE, set_rate
from dicedist.algorithm.probes import refuse_settings
from dicedist.algorithm.schedules import Knots, ScheduleValues, piecewise_constant
from dicedist.config.schema import Config

SLOPE = 0.2


class Judge(Companion):
    """D_i. Used in training only, so its batch norm keeps no running statistics; it sees real and fake separately."""

    def __init__(self, member: int, peer: int, shape: MapShape, rates: Knots, weight_decay: float, spares_norms: bool):
        super().__init__()
        self.member, self.peer, self.shape = member, peer, shape
        self.rates, self.weight_decay, self.spares_norms = rates, weight_decay, spares_norms
        channels, rows, columns = shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels, track_running_stats=False),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(channels, 1, (half(rows), half(columns))),
            nn.Flatten(0),
        )

    def forward(self, map_BX: Tensor) -> Tensor:
        """How much of each input's map is the peer's, 0 to 1."""
        return self.layers(unflattened(map_BX, self.shape)).sigmoid()

    def lesson(self, fields: Mapping[int, Fields]) -> Tensor:
        return (1 - self(fields[self.member]["map"])).square().mean()

    def study(self, optimizer: torch.optim.Optimizer, fields: Mapping[int, Fields], now: ScheduleValues) -> Tensor:
        real_B, fake_B = (self(fields[member]["map"].detach()) for member in (self.peer, self.member))
        loss = (1 - real_B).square().mean() + fake_B.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        set_rate(optimizer, self.rate(now))
        optimizer.step()
        return loss.detach()

    def build_optimizer(self) -> torch.optim.Optimizer:
        return self.adam(list(self.parameters()))

    def build_second(self, encoder: Network) -> torch.optim.Optimizer:
        return self.adam(encoder.extractor)

    def adam(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        spared = {id(parameter) for parameter in parameters if self.spares_norms and parameter.ndim <= 1}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if (id(p) in spared) == is_spared], RATE: 1.0, "weight_decay": decay}
            for is_spared, decay in ((False, self.weight_decay), (True, 0.0))
        ]
        return torch.optim.Adam([group for group in groups if group["params"]], fused=True)

    def rate(self, now: ScheduleValues) -> float:
        return piecewise_constant(self.rates, now.epoch)


class Term(OnMaps):
    def __init__(
        self,
        temperature: float,
        rates: Sequence[Sequence[float]],
        weight_decay: float,
        spares_norms: bool,
        ramp_up: bool,
    ):
        """rates, weight_decay: of Adam; the decay is an L2 penalty, which spares_norms keeps from norms and biases.

        ramp_up: the distillation of logits grows with the ramp-up, as all do in the paper on DICE; its own has none.
        """
        super().__init__(temperature)
        if not rates or [epoch for epoch, _ in rates] != sorted(epoch for epoch, _ in rates) or rates[0][0] != 0:
            raise ValueError(f"method.terms.afd.rates={rates}: write [[0, 2e-5], [75, 2e-6]], epochs ascending from 0")
        self.rates, self.weight_decay, self.spares_norms = rates, weight_decay, spares_norms
        self.follows = ("ramp_up",) if ramp_up else ()

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        if any(network.pool is not None and not network.extractor for network in networks):
            raise ValueError("afd teaches encoders, and network.freeze leaves nothing of them to learn: freeze less")
        refuse_settings(config, "differentiates a batch twice, for two optimizers, which cannot be done here")
        super().check(config, networks, sizes)
        if len(found := sorted({"x".join(map(str, shape)) for shape in map_shapes(sizes)})) > 1:
            raise ValueError(
                f"afd compares maps of one shape, and members have {' and '.join(found)}: leave out "
                "network.per_member, or name networks of one family"
            )

    def receives(self, receiver: int, sender: int, num_members: int) -> tuple[str, ...]:
        return ("logits", "map") if sender == before(receiver, num_members) else ()

    def companion(self, member: int, sizes: Sequence[Sizes]) -> Companion:
        shape, peer = map_shapes(sizes)[member], before(member, len(sizes))
        return Judge(member, peer, shape, self.rates, self.weight_decay, self.spares_norms)

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        teacher_BK = view.fields[before(view.index, view.num_members)]["logits"].detach()
        weight = now.ramp_up if self.follows else 1.0
        return {"distillation": weight * self.distil(view.own.logits_BK, teacher_BK)}


def before(member: int, num_members: int) -> int:
    """The member that it learns from."""
    return (member - 1) % num_members


def half(length: int) -> int:
    """What a convolution of stride 2 leaves of a side."""
    return (length + 1) // 2
