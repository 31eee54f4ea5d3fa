"""One batch as a rank sees it.

Legend: B inputs, C colors, H rows, W columns, V values of a vector.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

StepKey = tuple[int, int]  # (epoch, step in the epoch), the key of every random draw of a step


@dataclass(frozen=True)
class Batch:
    epoch: int
    step_in_epoch: int
    size: int  # inputs of the whole batch
    rows: slice  # the rows of the whole batch that this rank trains on: all, or the share of a replica
    indices_B: Tensor  # positions in the data split, on the CPU
    labels_B: Tensor
    checksum: int  # of the whole batch
    images: list[Tensor]  # float32 [B, C, H, W] channels_last, or vectors [B, V]; one tensor, one per member, or none
    margin: tuple[int, int] = (0, 0)  # inputs before and after `rows`: the partners that mixing needs, until trimmed

    @property
    def fraction(self) -> float:
        """Return the share of the whole batch that this rank sees."""
        return len(self.labels_B) / self.size

    @property
    def key(self) -> StepKey:
        return self.epoch, self.step_in_epoch

    @property
    def kept(self) -> slice:
        """Return the rows without the margin."""
        before, after = self.margin
        return slice(before, len(self.labels_B) - after)

    def trimmed(self) -> Self:
        """Return the batch without the margin."""
        kept, images = self.kept, [view[self.kept] for view in self.images]
        return replace(self, indices_B=self.indices_B[kept], labels_B=self.labels_B[kept], images=images, margin=(0, 0))


class Views:
    """The input tensor of each member on this rank: one tensor for all members, or one each (data.per_member)."""

    def __init__(self, tensors: Iterable[Tensor], members: Sequence[int]):
        self.tensors, self.members = list(tensors), list(members)
        assert not members or len(self.tensors) in (1, len(self.members))

    def __getitem__(self, member: int) -> Tensor:
        return self.tensors[self.members.index(member) if len(self.tensors) > 1 else 0]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply the function once to each distinct tensor."""
        return type(self)((function(tensor) for tensor in self.tensors), self.members)

    def apart(self) -> Self:
        """Return views with one entry per member, even if members share a tensor."""
        return type(self)((self[member] for member in self.members), self.members)


def share(batch: int, replicas: int, replica: int) -> slice:
    """Return the rows of a batch that one replica of a member sees; the first replicas take the remainder."""
    each, extra = divmod(batch, replicas)
    first = replica * each + min(replica, extra)
    return slice(first, first + each + (replica < extra))


def paired(rows: slice, batch: int) -> slice:
    """Return the rows, widened to whole pairs of neighbors (0 and 1, 2 and 3, ...) of the batch."""
    return slice(rows.start - rows.start % 2, min(rows.stop + rows.stop % 2, batch))
