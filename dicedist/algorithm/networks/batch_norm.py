"""Batch normalization over the whole batch of a member, of which each replica sees a share.

torch's SyncBatchNorm does the same on GPUs, and is used there. This one also runs on CPUs, so that tests can compare
replicas with a single process.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

COUNTER = "num_batches_tracked"
Total = Callable[[Tensor], Tensor]  # the differentiable sum over all replicas
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d)  # a subclass may do more, as timm's, which ends with the activation


class SyncBatchNorm(nn.Module):
    """A batch norm over all replicas. It takes the weights and statistics of a batch norm, under the same names."""

    num_batches_tracked: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, total: Total):
        super().__init__()
        self.norm, self.total = [norm], total  # in a list, so that its parameters are not registered twice
        self.weight, self.bias = norm.weight, norm.bias
        assert norm.momentum is not None
        self.momentum = norm.momentum
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        (norm,) = self.norm
        if not self.training:
            return nn.functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=norm.eps
            )
        values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        others = [dim for dim in range(values.dim()) if dim != 1]
        here = values.new_full((1,), values.numel() // values.shape[1])
        sums = self.total(torch.cat([values.sum(others), here]))
        channels = values.shape[1]
        count, mean_C = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        shape = [1, channels] + [1] * (values.dim() - 2)
        centered = values - mean_C.view(shape)
        # In two passes: the mean of squares minus the square of the mean loses digits if the mean is large.
        variance_C = self.total(centered.square().sum(others)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * count / (count - 1), self.momentum)
        scale_C = self.weight * (variance_C + norm.eps).rsqrt()
        return (centered * scale_C.view(shape) + self.bias.view(shape)).to(inputs.dtype)


def synchronize(module: nn.Module, synchronized: Callable[[Any], nn.Module], frozen: Collection[str] = ()) -> None:
    """Replace every batch norm in the module by one over all replicas; its parameters stay the same objects.

    frozen: the names of batch norms that normalize by their running statistics, which are equal on all replicas.
    """
    norms = {name: child for name, child in module.named_modules() if isinstance(child, PLAIN) and name not in frozen}
    for name, norm in norms.items():
        if type(norm) not in PLAIN or not norm.affine or not norm.track_running_stats or norm.momentum is None:
            raise ValueError(
                f"ensemble.sync_batch_norm=true needs torch's batch norms with weights, running statistics and "
                f"momentum, not {norm}: leave it out, or write ensemble.replicas=1"
            )
        place, _, own = name.rpartition(".")
        setattr(module.get_submodule(place), own, synchronized(norm))


def plain_norms(module: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d]:
    """Return the batch norms whose count of batches nothing reads: a fixed momentum, and no synchronization."""
    norms = (child for child in module.modules() if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d))
    return [norm for norm in norms if norm.num_batches_tracked is not None and norm.momentum is not None]


@contextlib.contextmanager
def counted_together(norms: Sequence[nn.BatchNorm1d | nn.BatchNorm2d]) -> Iterator[None]:
    """Run one forward pass inside the context: all batch norms count the batch in one operation."""
    counting = [norm._buffers for norm in norms if norm.training]
    counters = [counter for buffers in counting if (counter := buffers[COUNTER]) is not None]
    for buffers in counting:
        buffers[COUNTER] = None
    try:
        yield
    finally:
        for buffers, counter in zip(counting, counters, strict=True):
            buffers[COUNTER] = counter
    if counters:
        torch._foreach_add_(counters, 1)


@contextlib.contextmanager
def statistics_untouched(module: nn.Module) -> Iterator[None]:
    """Inside the context, batch norms normalize as in training, but keep their running statistics unchanged.

    Synchronized batch norms need a counter, so they count into a copy.
    """
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm | SyncBatchNorm
    norms: list[Any] = [child for child in module.modules() if isinstance(child, kinds)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        plain = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        norm.momentum, norm.num_batches_tracked = 0.0, None if plain else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
