"""Feature fusion learning (Kim et al., 2019): a classifier on the fused maps of all members teaches them, and learns.

sum_i CE_i + CE(z_f) + r [sum_i KD(z_i <- z_f) + KD(z_f <- mean_i z_i)], with every teacher held constant. z_f are the
logits of the fusion: all members' last maps side by side, a depthwise 3x3 convolution, a 1x1 convolution to C channels,
each with batch norm and ReLU, then average pooling and a dense layer. The fusion acts on all members at once, so it is
their counterpart. It reads maps and logits, minimizes CE(z_f) + r KD(z_f <- mean z), and answers with z_f and with
the gradient of this loss in every map. It uses the run's optimizer with its own weight decay. The authors' code has
two branches. More branches, and members with different numbers of channels, are the obvious extension: C is then the
largest number.

Legend: M members, B inputs, C channels, K classes, X values of a map.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dicedist.algorithm.batch import StepKey
from dicedist.algorithm.counterpart import Counterpart, Read
from dicedist.algorithm.member import to_float32
from dicedist.algorithm.messages import Answers, Sizes, Values
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import CounterpartTerm, FusedHead, View
from dicedist.algorithm.objectives._distillation import distil
from dicedist.algorithm.objectives._maps import MapShape, OnMaps, map_shapes, unflattened
from dicedist.algorithm.optimizers import build_optimizer, set_rate
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.targets import Targets
from dicedist.config.schema import Config, OptimizerConfig, RedundancyConfig


class Fusion(nn.Module):
    def __init__(self, shapes: Sequence[MapShape], num_classes: int):
        super().__init__()
        self.shapes = list(shapes)
        together, width = sum(shape[0] for shape in shapes), max(shape[0] for shape in shapes)
        depthwise = nn.Conv2d(together, together, 3, padding=1, groups=together, bias=False)
        pointwise = nn.Conv2d(together, width, 1, bias=False)
        for layer in (depthwise, pointwise):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        self.layers = nn.Sequential(
            depthwise, nn.BatchNorm2d(together), nn.ReLU(inplace=True),
            pointwise, nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes),
        )  # fmt: skip

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the fused logits. maps: of every member [B, X]."""
        each = [unflattened(map_BX, shape) for map_BX, shape in zip(maps, self.shapes, strict=True)]
        return self.layers(torch.cat(each, 1))


class FusedClassifier(Counterpart):
    def __init__(
        self,
        shapes: Sequence[MapShape],
        num_classes: int,
        temperature: float,
        settings: OptimizerConfig,
    ):
        super().__init__()
        self.network, self.temperature, self.settings = Fusion(shapes, num_classes), temperature, settings

    def answers(self, read: Read, targets: Targets, now: ScheduleValues, key: StepKey) -> tuple[Answers, Values]:
        """Compute z_f and the gradients in the maps. `study` uses the gradients of the same backward pass."""
        self.network.zero_grad(set_to_none=True)
        maps_MBX = read["map"].detach().requires_grad_()
        fused_BK = to_float32(self.network(maps_MBX.unbind()))
        values = {
            "fusion/cross_entropy": targets.cross_entropy(fused_BK),
            "fusion/distillation": now.ramp_up * distil(fused_BK, read["logits"].mean(0), self.temperature),
        }
        torch.stack(list(values.values())).sum().backward()
        assert maps_MBX.grad is not None
        values["fusion/accuracy"] = (fused_BK.argmax(1) == targets.labels_B).float().mean()
        fused_MBK = fused_BK.detach().expand(len(maps_MBX), -1, -1)
        answers = Answers({"map": maps_MBX.grad}, {"fused": fused_MBK})
        return answers, {name: value.detach() for name, value in values.items()}

    def study(
        self, optimizer: torch.optim.Optimizer, read: Read, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> Values:
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        set_rate(optimizer, now.learning_rate)
        optimizer.step()
        return {}

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.settings, self)


class Term(OnMaps, CounterpartTerm):
    part = "fusion"
    gradients, outputs = ("map",), ("fused",)
    follows = ("ramp_up",)
    mixes = False  # the rank of the fusion may have no images, and so no shares of a mixture

    def __init__(self, temperature: float, weight_decay: float):
        """weight_decay: of the fusion."""
        super().__init__(temperature)
        if weight_decay < 0:
            raise ValueError(f"method.terms.ffl.weight_decay={weight_decay}: write a number from 0")
        self.weight_decay = weight_decay

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        super().check(config, networks, sizes)
        if config.optimizer.ema is not None:
            raise ValueError(f"method={config.method.name} fuses members, not their averages: write optimizer.ema=null")
        if len(found := sorted({f"{rows}x{columns}" for _, rows, columns in map_shapes(sizes)})) > 1:
            raise ValueError(
                f"ffl needs maps of one size, but members have {' and '.join(found)}: leave out "
                "network.per_member, or name networks of one family"
            )

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        return ("map", "logits")

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return super().widths(sizes) | {"fused": [size.classes for size in sizes]}

    def build_counterpart(self, config: Config, sizes: Sequence[Sizes]) -> Counterpart:
        settings = replace(config.optimizer, weight_decay=self.weight_decay)
        return FusedClassifier(map_shapes(sizes), sizes[0].classes, self.temperature, settings)

    @classmethod
    def fused_head(cls) -> FusedHead:
        return FusedHead("map", cls.part, "network", lambda sizes: Fusion(map_shapes(sizes), sizes[0].classes))

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        return {"distillation": now.ramp_up * self.distil(view.own.logits_BK, view.answers.outputs["fused"])}
