"""The shared class memory: for each class, the features of the last few inputs, as seen by all M members.

The rows lie in one tensor with room for a batch in front of them, so that partners are drawn from the batch and the
memory without copying the memory:

    pool    [ ... room ... | batch: B rows | memory: Q rows ]

Legend: M members, B inputs of a batch, D features, K classes, C entries per class, Q = K*C + 1 rows of memory (the last
row takes the inputs that are not kept).
"""

from typing import Any

import torch
from torch import Tensor, nn

KEPT = ("means", "scales")


class ClassMemory(nn.Module):
    """Stores means and scales, never samples, so that z can be drawn again (docs/choices.md, 10)."""

    written_K: Tensor  # inputs of each class seen so far

    def __init__(self, num_members: int, feature_dim: int, num_classes: int, capacity: int):
        super().__init__()
        self.capacity, self.room = capacity, 0
        rows = num_classes * capacity + 1
        for name in KEPT:
            self.register_buffer(f"pool_{name}", torch.zeros(num_members, rows, feature_dim), persistent=False)
        self.register_buffer("written_K", torch.zeros(num_classes, dtype=torch.int64))

    @property
    def means_MQD(self) -> Tensor:
        return self.get_buffer("pool_means")[:, self.room :]

    @property
    def scales_MQD(self) -> Tensor:
        return self.get_buffer("pool_scales")[:, self.room :]

    def with_batch(self, means_MBD: Tensor, scales_MBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and scales of the batch's rows, then the memory's. The next call may overwrite them."""
        if means_MBD.requires_grad:  # gradients flow to partners from the batch
            pairs = ((means_MBD, self.means_MQD), (scales_MBD, self.scales_MQD))
            means, scales = (torch.cat(pair, dim=1) for pair in pairs)
            return means, scales
        batch = means_MBD.shape[1]
        if batch > self.room:
            self.make_room(batch)
        first = self.room - batch
        pools = [self.get_buffer(f"pool_{name}")[:, first:] for name in KEPT]
        for pool, values in zip(pools, (means_MBD, scales_MBD), strict=True):
            pool[:, :batch] = values.detach()
        return pools[0], pools[1]

    def make_room(self, batch: int) -> None:
        for name in KEPT:
            kept_MQD = self.get_buffer(f"pool_{name}")[:, self.room :]
            if kept_MQD.is_cuda:  # w may still read the old pool on this stream when it is freed here
                kept_MQD.record_stream(torch.cuda.current_stream(kept_MQD.device))
            self.register_buffer(f"pool_{name}", torch.nn.functional.pad(kept_MQD, (0, 0, batch, 0)), persistent=False)
        self.room = batch

    @torch.no_grad()
    def write(self, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> None:
        """Keep the last C inputs of each class, without boolean indexing, which would synchronize the device."""
        num_classes = len(self.written_K)
        seen_BK = (labels_B[:, None] == torch.arange(num_classes, device=labels_B.device)).cumsum(0)
        nth_B = seen_BK.gather(1, labels_B[:, None])[:, 0] - 1
        total_K = seen_BK[-1]
        dropped_B = nth_B < total_K[labels_B] - self.capacity
        slots_B = labels_B * self.capacity + (self.written_K[labels_B] + nth_B) % self.capacity
        rows_B = slots_B.masked_fill_(dropped_B, num_classes * self.capacity)
        for memory_MQD, values in ((self.means_MQD, means_MBD), (self.scales_MQD, scales_MBD)):
            memory_MQD.index_copy_(1, rows_B, values)
        self.written_K += total_K

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the memory without the room, under the names that checkpoints have always had. Clear the last row."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in KEPT:
            self.get_buffer(f"pool_{name}")[:, -1] = 0
            destination[f"{prefix}{name}_MQD"] = self.get_buffer(f"pool_{name}")[:, self.room :]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name in KEPT:
            if (saved := state_dict.pop(f"{prefix}{name}_MQD", None)) is not None:
                self.get_buffer(f"pool_{name}")[:, self.room :].copy_(saved)
        super()._load_from_state_dict(state_dict, prefix, *others)
