"""The shared class memory: for each class, the features of the last few inputs, as seen by all M members.

Legend: M members, B inputs of a batch, D features, K classes, C entries a class, Q = K*C + 1 rows (the last takes
what is not kept).
"""

import torch
from torch import Tensor, nn


class ClassMemory(nn.Module):
    """Stores means and scales, never samples, so that z can be drawn anew (docs/choices.md, 10)."""

    means_MQD: Tensor
    scales_MQD: Tensor
    written_K: Tensor  # inputs of each class seen so far

    def __init__(self, num_members: int, feature_dim: int, num_classes: int, capacity: int):
        super().__init__()
        self.capacity = capacity
        rows = num_classes * capacity + 1
        self.register_buffer("means_MQD", torch.zeros(num_members, rows, feature_dim))
        self.register_buffer("scales_MQD", torch.zeros(num_members, rows, feature_dim))
        self.register_buffer("written_K", torch.zeros(num_classes, dtype=torch.int64))

    @torch.no_grad()
    def write(self, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> None:
        """Keep the last C inputs of each class, without boolean indexing, which would synchronise the device."""
        num_classes = len(self.written_K)
        seen_BK = (labels_B[:, None] == torch.arange(num_classes, device=labels_B.device)).cumsum(0)
        nth_B = seen_BK.gather(1, labels_B[:, None])[:, 0] - 1
        total_K = seen_BK[-1]
        kept_B = nth_B >= total_K[labels_B] - self.capacity
        slots_B = labels_B * self.capacity + (self.written_K[labels_B] + nth_B) % self.capacity
        rows_B = torch.where(kept_B, slots_B, num_classes * self.capacity)
        self.means_MQD.index_copy_(1, rows_B, means_MBD)
        self.scales_MQD.index_copy_(1, rows_B, scales_MBD)
        self.means_MQD[:, -1] = 0
        self.scales_MQD[:, -1] = 0
        self.written_K += total_K
