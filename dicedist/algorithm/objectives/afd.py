"""Feature-map-level online adversarial distillation (Chung et al., 2020): nets in a ring imitate each other's maps.

Member i learns from member i-1, the first member from the last. The run's optimizer minimizes
CE_i + r KD(z_i <- z_{i-1}). A second optimizer, Adam, minimizes (1 - D_i(map_i))^2 over the encoder alone. D_i shares
the rank of member i. After both, D_i learns with Adam that the peer's map is real and the member's own map is fake:
(1 - D_i(map_{i-1}))^2 + D_i(map_i)^2. Peers are constant, and both gradients of a member are taken at the same weights.

The authors published no code. Third-party descriptions agree on the loss and the ring. The optimizers, their schedule
and the layer types of D are recalled, not read. Three things are decided here: the sizes of D, that logits use the same
ring, and that D learns last.

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
    """The adversary D_i. Batch norm keeps no running statistics: only training uses D_i. Real and fake pass apart."""

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
        """Return for each input how much its map looks like the peer's, 0 to 1."""
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
        """rates, weight_decay: of Adam. The decay is an L2 penalty; spares_norms exempts norms and biases.

        ramp_up: the distillation of logits grows with the ramp-up, as in the DICE paper; the AFD paper has no ramp-up.
        """
        super().__init__(temperature)
        if not rates or [epoch for epoch, _ in rates] != sorted(epoch for epoch, _ in rates) or rates[0][0] != 0:
            raise ValueError(f"method.terms.afd.rates={rates}: write [[0, 2e-5], [75, 2e-6]], epochs ascending from 0")
        self.rates, self.weight_decay, self.spares_norms = rates, weight_decay, spares_norms
        self.follows = ("ramp_up",) if ramp_up else ()

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        if any(network.pool is not None and not network.extractor for network in networks):
            raise ValueError("afd trains encoders, but network.freeze freezes them entirely: freeze fewer layers")
        refuse_settings(config, "differentiates every batch twice, for two optimizers")
        super().check(config, networks, sizes)
        if len(found := sorted({"x".join(map(str, shape)) for shape in map_shapes(sizes)})) > 1:
            raise ValueError(
                f"afd needs maps of one shape, but members have {' and '.join(found)}: leave out "
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
    """Return the member that this member learns from."""
    return (member - 1) % num_members


def half(length: int) -> int:
    """Return the side of a map after a convolution of stride 2."""
    return (length + 1) // 2
