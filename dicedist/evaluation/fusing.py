"""The fused classifier of a method that has one: read on all members at once, batch by batch, on the reporter.

All maps of a split would not fit into memory: those of a batch are collected from the ranks of their members, fused,
and let go.

Legend: B inputs, N inputs of a split, K classes, X values that a member gives for one input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from dicedist.algorithm.build import sizes
from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.objectives import Method
from dicedist.cluster.control import Control
from dicedist.config.plan import Plan
from dicedist.config.schema import Config
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import AVERAGED_WEIGHTS, WEIGHTS, Checkpoint


@dataclass
class Fusing:
    """All ranks that read members have one, and call it after each batch; only the reporter's has the classifier."""

    reads: str  # of every member: mean or map
    widths: Sequence[int]  # X of every member
    hosts: Sequence[int]  # the rank that reads each of them
    control: Control
    classifier: nn.Module | None
    device: torch.device
    chunks: list[Tensor] = field(default_factory=list)

    def __call__(self, own: Mapping[int, Tensor], batch: int) -> None:
        """own: [B, X] of the members that this rank reads."""
        shapes = [(batch, width) for width in self.widths]
        received = self.control.collect({i: own_BX.float().cpu() for i, own_BX in own.items()}, shapes, self.hosts)
        if received is not None:
            assert self.classifier is not None
            self.chunks.append(self.classifier([each_BX.to(self.device) for each_BX in received]).float().cpu())

    def take(self) -> Tensor | None:
        """The logits [N, K] of all batches since the last time, on the reporter."""
        logits_NK = torch.cat(self.chunks) if self.chunks else None
        self.chunks.clear()
        return logits_NK


def widths(fuses: str, of_members: Sequence[Sizes]) -> list[int]:
    return [prod(size.map) if fuses == "map" and size.map else size.features for size in of_members]


def fusing_of(
    config: Config,
    method: Method,
    plan: Plan,
    members: Sequence[int],
    hosts: Sequence[int],
    control: Control,
    num_classes: int,
    device: torch.device,
    found: Checkpoint | None,
) -> Fusing | None:
    """None if the method fuses nothing, or not all members are evaluated. found: on the reporter."""
    term = method.fusing
    if term is None or term.fuses is None or list(members) != list(range(plan.num_predictors)):
        return None
    of_members = sizes(config, method, plan, num_classes)
    classifier = None if found is None else load_fusion(config, method, of_members, found).to(device)
    return Fusing(term.fuses, widths(term.fuses, of_members), hosts, control, classifier, device)


def load_fusion(config: Config, method: Method, of_members: Sequence[Sizes], found: Checkpoint) -> nn.Module:
    assert method.fusing is not None
    module = method.fusing.fusion(of_members)
    module.load_state_dict(fusion_weights(config, method, found))
    return module.eval().requires_grad_(False)


def fusion_weights(config: Config, method: Method, found: Checkpoint) -> dict[str, Tensor]:
    """The fused classifier's weights, by their names in it."""
    assert method.fusing is not None
    part, name = method.fusing.fused_by
    kind = AVERAGED_WEIGHTS if config.uses_average else WEIGHTS
    beginning = f"{kind}{name}."
    tensors = checkpoint.tensors_of(found, part)
    return {key.removeprefix(beginning): value for key, value in tensors.items() if key.startswith(beginning)}
