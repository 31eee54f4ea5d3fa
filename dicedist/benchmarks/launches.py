"""Operations that a step launches, by span: small networks wait for launches, not for arithmetic.

Without a GPU the operations are counted on the CPU, in the code that a GPU would run. An operation is a call of one of
torch's kernels. Some operations launch several kernels, which only a GPU can count.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.spans import listening
from dicedist.benchmarks.building import build_step, random_batch, with_size
from dicedist.cluster.devices import pick_device
from dicedist.cluster.world import World
from dicedist.config import Config

WARM_UP = 2
BY_MEMBERS = ("encode", "backward", "optimizer")
REST = "the rest"
# Operations that allocate or describe memory, or concern the host only.
NOTHING = {
    "alias", "as_strided_", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
    "new_empty_strided", "promote_types", "_local_scalar_dense", "_record_function_enter_new",
    "_record_function_exit", "_unsafe_view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operations of each span by name, inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.found = [REST], dict[str, Counter[str]]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view and name not in NOTHING:
            self.found.setdefault(self.open[-1], Counter())[name] += 1
        return function(*arguments, **(named or {}))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.pop()


def launches(config: Config) -> list[dict[str, Any]]:
    """Return one row per span, with all parts in one process; on a GPU also the kernels of the whole step."""
    config, device = with_size(config), pick_device()
    step, _ = build_step(config, World(0, 1, device))
    batch = random_batch(config, device)
    if isinstance(step.hosted.w, Discriminator):
        step.hosted.w.in_blocks = False
    for _ in range(WARM_UP):
        step(batch)
    counted, members = Launches(), len(step.hosted.members)
    with listening(counted.span), counted:
        step(batch)
    sums = {name: found.total() for name, found in counted.found.items()}
    rows: list[dict[str, Any]] = [
        {"span": name, "operations": count, "of a member": count / members if name in BY_MEMBERS else None}
        for name, count in {**sums, "whole step": sum(sums.values())}.items()
    ]
    if device.type == "cuda":
        rows.append({"span": "kernels of the step", "operations": kernels(lambda: step(batch)), "of a member": None})
    return rows


def kernels(run: Callable[[], object]) -> int:
    """Count the kernels and copies that the GPU ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())
