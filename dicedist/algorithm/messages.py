"""The messages of a step, and the interface of the exchange that carries them.

Legend: M members, B inputs, D features.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Fields = dict[str, Tensor]  # the tensors that a member may send, each [B, width]
Values = dict[str, Tensor]  # named scalars for the records, which stay on the device until they are logged
FEATURES = ("mean", "scale")  # the fields that a discriminator may read


@dataclass(frozen=True)
class Sizes:
    """The sizes of one member, from which the widths of its fields follow."""

    features: int  # D
    pixels: int  # values of an input: an image in all colors, or a vector
    classes: int  # K
    map: tuple[int, int, int] | None = None  # channels, rows and columns before pooling, if the method reads them


@dataclass(frozen=True)
class Traffic:
    """The fields that each receiver needs from each sender, independent of the ranks that host them."""

    widths: Mapping[str, Sequence[int]]  # for each field, the floats per input of each member
    received: Mapping[tuple[int, int], tuple[str, ...]]  # (receiver, sender) -> the sender's fields that it must see
    features: tuple[str, ...]  # the fields that the counterpart (the discriminator, a fusion) reads
    compared: Sequence[int]  # the members whose fields it reads
    gradients: tuple[str, ...] = ("mean",)  # the fields whose gradients it answers
    outputs: tuple[str, ...] = ()  # other fields that it answers, with the widths in `widths`


@dataclass(frozen=True)
class Answers:
    """The counterpart's answers: to one member [B, width], or to all members that it reads [M, B, width]."""

    gradients: Fields = field(default_factory=dict)  # d(loss)/d(field), with the weight of the loss applied
    outputs: Fields = field(default_factory=dict)  # results of the counterpart that terms read


@dataclass
class Gathered:
    """The result of a gather on this rank: fields by member, and a flag for each member that is out of step."""

    fields: dict[int, Fields]
    out_of_step_M: Tensor

    def stacked(self, name: str, members: Sequence[int]) -> Tensor:
        """Return [members, B, largest width], with narrower members padded with zeros."""
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

    def synchronize(self, module: nn.Module, frozen: Collection[str]) -> None: ...

    def replicated(self, module: nn.Module) -> nn.Module: ...


def times(factor: float, value: Tensor) -> Tensor:
    """Multiply, but launch no kernel for a factor of 1."""
    return value if factor == 1 else factor * value
