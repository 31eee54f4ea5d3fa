"""Resolve `auto` settings when a run begins: grouped or sequential members, pairs that w compares, ranks that divide w.

Grouped and sequential execution give equal results up to rounding. Only a measurement shows which is faster: sequential
execution launches more kernels, but grouped convolutions may be slower.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.checks import why_not_batched, why_not_shared
from dicedist.algorithm.encoders import Encoders
from dicedist.cluster.assembly import host
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import AUTO
from dicedist.cluster.world import World
from dicedist.config.plan import Plan
from dicedist.console.tables import table
from dicedist.runs import resume
from dicedist.training.forecast import dividing, now_done, pairs_that_hide, zeros
from dicedist.training.job import Job

WAYS = {False: "one after another", True: "one grouped network"}  # by the value of ensemble.batched
WARM_UP, ROUNDS = 2, 5
NEVER = 10**9  # milliseconds, for a way that does not fit into memory


def faster_way(job: Job, world: World, exchange: Exchange, teacher: nn.Module | None) -> tuple[bool, str]:
    """Resolve ensemble.batched=auto on copies, and return a table with the reason. All ranks call this."""
    reason = why_not_batched(job.config, job.plan)
    if reason is not None:
        return False, f"members of one device run one after another: {reason}"
    hosted = host(job.config, job.method, job.plan, exchange, job.extent.num_classes)
    encoders = {
        way: Encoders(job.config, job.method, replace(job.plan, grouped=way), hosted, exchange, teacher) for way in WAYS
    }
    spent: dict[bool, list[float]] = {way: [] for way in WAYS}
    batch = blank(job, world, has_images=bool(hosted.members))
    for _ in range(WARM_UP + ROUNDS):
        for way in WAYS:
            # The slowest rank sets the pace; ranks with one member have nothing to choose.
            spent[way].append(world.control.maximum(round(1000 * milliseconds(encoders[way], batch))) / 1000)
    found = {way: median(times[WARM_UP:]) for way, times in spent.items()}
    rows = [[WAYS[way], "does not fit" if taken >= NEVER else f"{taken:.1f}"] for way, taken in found.items()]
    return found[True] < found[False], table(["members of one device", "ms for a batch"], rows)


def blank(job: Job, world: World, has_images: bool) -> Batch:
    """Return a batch of zeros with the shape of a training batch."""
    size = job.config.batch_size
    images = [zeros(size, job).to(world.device)] if has_images else []
    labels = (torch.arange(size) % job.extent.num_classes).to(world.device)
    return Batch(0, 0, size, slice(None), torch.arange(size), labels, 0, images)


def milliseconds(encoders: Encoders, batch: Batch) -> float:
    """Time forward and backward of the members hosted here."""
    started = now_done(encoders.exchange.device)
    try:
        heads = [encoding.logits_BK.sum() for encoding in encoders.encode(batch).values()]
        if heads:
            torch.autograd.backward(heads)
    except torch.OutOfMemoryError:
        return NEVER
    finally:
        for part in encoders.hosted.learners:
            part.optimizer.zero_grad(set_to_none=True)
    return 1000 * (now_done(encoders.exchange.device) - started)


def resolve_auto(job: Job, world: World, exchange: Exchange, teacher: nn.Module | None) -> tuple[Plan, list[str]]:
    """Resolve every `auto` setting: reuse the recorded value, or measure it once. All ranks call this.

    Return the plan, and messages for the user.
    """
    saved, messages, plan = resume.saved_in(job.run, job.config) if world.reports else None, [], job.plan

    def resolved(recorded: Any, measure: Callable[[], Any]) -> Any:
        found = world.control.broadcast({"found": recorded})["found"]
        return world.control.broadcast({"found": measure()})["found"] if found is None else found

    def way() -> bool | None:
        """Return None if there is nothing to choose: the run may resume on other devices."""
        shared = any(len(job.placement.members_on(rank)) > 1 for rank in job.placement.member_ranks)
        if world.device.type == "cpu" or not shared:
            return None
        grouped, why = faster_way(job, world, exchange, teacher)
        messages.append(why)
        return grouped

    def divided() -> bool | None:
        if not may_divide(job, world):
            return None
        is_faster, why = dividing(replace(job, plan=plan), world, exchange, teacher)
        messages.append(why)
        return is_faster

    if job.config.redundancy.max_pairs == "auto" and job.method.counterpart is not None:
        known = saved.plan.max_pairs if saved else None
        plan = replace(plan, max_pairs=resolved(known, lambda: pairs_that_hide(job, world, exchange, teacher)))
    if job.config.ensemble.batched == "auto":
        plan = replace(plan, grouped=resolved(saved.plan.grouped if saved else None, way))
    if job.config.redundancy.ranks == AUTO:
        same_ranks = saved is not None and len(saved.plan.parts) == world.size
        plan = replace(plan, divided=resolved(saved.plan.divided if saved and same_ranks else None, divided))
    return plan, messages


def may_divide(job: Job, world: World) -> bool:
    """Return whether ranks may divide w. Not on a CPU, where results must not depend on the number of ranks."""
    config = job.config
    if world.device.type == "cpu" or world.size == 1 or config.ensemble.replicas > 1 or config.redundancy.graph:
        return False
    return job.method.counterpart is not None and why_not_shared(config, job.method, job.plan, world.size) is None
