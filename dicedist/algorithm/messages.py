"""The messages of a step, and the interface of the exchange that carries them.

Legend: M members, B inputs, D features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Fields = dict[str, Tensor]  # what a member may send, each [B, width]
Values = dict[str, Tensor]  # named scalars for the records, which stay on the device until they are logged
FEATURES = ("mean", "scale")  # the fields that a discriminator may read


@dataclass(frozen=True)
class Sizes:
    """The sizes of one member, from which the widths of its fields follow."""

    features: int  # D
    pixels: int  # values of an input: of an image in all colours, of a vector
    classes: int  # K
    map: tuple[int, int, int] | None = None  # channels, rows and columns before pooling, where the method reads them


@dataclass(frozen=True)
class Traffic:
    """Who must see which fields of whom, independent of the ranks that host them."""

    widths: Mapping[str, Sequence[int]]  # for each field, the floats per input of each member
    received: Mapping[tuple[int, int], tuple[str, ...]]  # (receiver, sender) -> the sender's fields that it must see
    features: tuple[str, ...]  # the fields that the counterpart (the discriminator, a fusion) reads
    compared: Sequence[int]  # the members whose fields it reads
    gradients: tuple[str, ...] = ("mean",)  # the fields whose gradients it answers each of them
    outputs: tuple[str, ...] = ()  # what else it answers, as wide as `widths` says


@dataclass(frozen=True)
class Answers:
    """What the counterpart answers: one member's rows [B, width], or those of all members it reads, [M, B, width]."""

    gradients: Fields = field(default_factory=dict)  # d(loss)/d(field), with the weight of the loss applied
    outputs: Fields = field(default_factory=dict)  # results of the counterpart that terms read


@dataclass
class Gathered:
    """What this rank holds after a gather: the fields by member, and which members were out of step (1) or not (0)."""

    fields: dict[int, Fields]
    out_of_step_M: Tensor

    def stacked(self, name: str, members: Sequence[int]) -> Tensor:
        """[members, B, largest width], with narrower members padded with zeros."""
        rows = [self.fields[member][name] for member in members]
        width = max(row.shape[-1] for row in rows)
        pads = [width - row.shape[-1] for row in rows]
        return torch.stack([pad(row, (0, more)) if more else row for row, more in zip(rows, pads, strict=True)])


class Carrier(Protocol):
    """The exchange between ranks, as the step sees it: dicedist.cluster.exchange, or one that stays in one process."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_members(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    @property
    def compared(self) -> Sequence[int]: ...

    def gather(self, own: Mapping[int, Fields], size: int, mark: Tensor) -> Gathered: ...

    @property
    def widths(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def features(self) -> tuple[str, ...]: ...

    def scatter(self, answers: Answers | None, size: int) -> dict[int, Answers]: ...

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None: ...

    def sum_over_members(self, values: Tensor) -> Tensor: ...

    def synchronise(self, module: nn.Module) -> None: ...

    def replicated(self, module: nn.Module) -> nn.Module: ...


def times(factor: float, value: Tensor) -> Tensor:
    """Multiply, unless that would only launch a kernel."""
    return value if factor == 1 else factor * value
