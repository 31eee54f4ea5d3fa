"""One batch as a rank sees it.

Legend: B inputs, C colours, H rows, W columns.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    epoch: int
    step_in_epoch: int
    size: int  # of the whole batch
    rows: slice  # those that are here: all of them, except on a replica of a member
    indices_B: Tensor  # places in the split, on the CPU
    labels_B: Tensor
    checksum: int  # of the whole batch
    views: list[Tensor]  # float32 [B, C, H, W] channels_last: one for all members, or one for each, or none


def share(batch: int, replicas: int, replica: int) -> slice:
    """The rows of a batch that one of a member's replicas sees; the first ones get what does not divide."""
    each, extra = divmod(batch, replicas)
    first = replica * each + min(replica, extra)
    return slice(first, first + each + (replica < extra))
