"""Which way of running the members of one device is the faster one, timed when a run begins on GPUs.

Both ways compute the same to rounding, and a GPU alone can say which is faster: one after another launches more
kernels, and grouped convolutions may be slower ones.
"""

import contextlib
from collections.abc import Iterator
from statistics import median

import torch

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import why_not_batched
from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.step import Step
from dicedist.cluster.world import World
from dicedist.config.schema import Config
from dicedist.console.tables import table
from dicedist.data.sources import Source
from dicedist.tracking.forecast import now_done, zeros

WAYS = {False: "one after another", True: "one grouped network"}  # by the value of ensemble.batched
WARM_UP, ROUNDS = 2, 5
NEVER = 10**9  # milliseconds: where a way does not fit into the memory


def faster_way(config: Config, world: World, step: Step, source: Source) -> tuple[bool, str]:
    """All ranks call: what ensemble.batched=auto comes to, and the table that shows why. The step is left as it was."""
    reason = why_not_batched(config)
    if reason is not None:
        return False, f"members of one device run one after another: {reason}"
    spent: dict[bool, list[float]] = {way: [] for way in WAYS}
    batch = blank(config, world, step, source)
    with unchanged(step.hosted):
        for _ in range(WARM_UP + ROUNDS):
            for way in WAYS:
                step.batch_members(way)
                # The slowest rank sets the pace; hosts of one member have nothing to choose.
                spent[way].append(world.control.agree(round(1000 * milliseconds(step, batch))) / 1000)
    step.batch_members(False)
    found = {way: median(times[WARM_UP:]) for way, times in spent.items()}
    rows = [[WAYS[way], "does not fit" if taken >= NEVER else f"{taken:.1f}"] for way, taken in found.items()]
    return found[True] < found[False], table(["members of one device", "ms for a batch"], rows)


def blank(config: Config, world: World, step: Step, source: Source) -> Batch:
    """A batch of the shape of all others."""
    size = config.batch_size
    images = [zeros(size, source).to(world.device)] if step.hosted.members else []
    labels = (torch.arange(size) % source.num_classes).to(world.device)
    return Batch(0, 0, size, slice(None), torch.arange(size), labels, 0, images)


def milliseconds(step: Step, batch: Batch) -> float:
    """For forward and backward of the members hosted here."""
    started = now_done(step.device)
    try:
        heads = [encoding.logits_BK.sum() for encoding in step.encode(batch).values()]
        if heads:
            torch.autograd.backward(heads)
    except torch.OutOfMemoryError:
        return NEVER
    finally:
        for part in step.hosted.learners:
            part.optimizer.zero_grad(set_to_none=True)
    return 1000 * (now_done(step.device) - started)


@contextlib.contextmanager
def unchanged(hosted: Hosted) -> Iterator[None]:
    """The running statistics of batch norms are put back."""
    buffers = [buffer for part in hosted.learners for buffer in part.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
