"""One batch as a rank sees it.

Legend: B inputs, C colours, H rows, W columns, V values of a vector.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    epoch: int
    step_in_epoch: int
    size: int  # of the whole batch
    rows: slice  # the rows on this rank: all of them, or the share of a replica
    indices_B: Tensor  # positions in the data split, on the CPU
    labels_B: Tensor
    checksum: int  # of the whole batch
    images: list[Tensor]  # float32 [B, C, H, W] channels_last, or vectors [B, V]: one for all members, each, or none


def share(batch: int, replicas: int, replica: int) -> slice:
    """The rows of a batch that one replica of a member sees; the first replicas take the remainder."""
    each, extra = divmod(batch, replicas)
    first = replica * each + min(replica, extra)
    return slice(first, first + each + (replica < extra))
