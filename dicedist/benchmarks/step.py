"""Where the time of a step goes, and what diversity costs compared with independent training.

Legend: M members, B inputs, D features.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import build_member, feature_dims
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.objectives.vceb import gaussian_divergence
from dicedist.algorithm.spans import listening
from dicedist.algorithm.step import Step
from dicedist.benchmarks.literal import LiteralDiscriminator
from dicedist.benchmarks.timing import compare
from dicedist.cluster.assembly import assemble
from dicedist.cluster.devices import pick_device
from dicedist.cluster.placement import DEFAULT_SIZE, Placement, place
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import World, joined
from dicedist.config import Config, compose_config
from dicedist.data import sources
from dicedist.data.pipeline import Loader
from dicedist.tracking.forecast import now_done

# The spans of a step and its exchange; wait: until a message has arrived.
SPANS = ("encode", "gather", "redundancy", "scatter", "learn", "backward", "optimiser", "wait")
WARM_UP, STEPS = 2, 6
STEPS_PER_EPOCH = 1000


def step(config: Config) -> list[dict[str, Any]]:
    """Seconds of each phase and images/s of every rank, in one process or under torchrun; only rank 0 has them all."""
    placement = placement_of(config, world_size())
    source = sources.load(config.data, labels_only=not placement.members_on(this_rank()))
    with joined(config.distributed.timeout) as world:
        timed = bench_step(config, world, source.num_classes)
        members = placement.members_on(world.rank)
        loader = Loader(source.train, config.data, source, config.batch_size, config.seed, world.device, members)
        spent = phases(timed, loader, world)
        spent["step that nobody watches"], spent["processor time of it"] = unwatched(timed, loader, world)
        speed = config.batch_size / spent["step that nobody watches"] if members else None
        own = {**spent, "images/s of a member": speed}
        records = world.control.report(own)
    columns = {f"rank {rank}": record for rank, record in enumerate(records)}
    return [{"seconds": name, **{rank: record[name] for rank, record in columns.items()}} for name in own]


def phases(timed: Step, loader: Loader, world: World) -> dict[str, float]:
    """Mean seconds per step. A span is timed until the device has finished it; a real step would not wait for that.

    A span inside another (the optimiser in backward, waiting in gather and scatter) is counted once.
    """
    spent = dict.fromkeys(["data", *SPANS], 0.0)
    batches = loader.epoch(0)
    with listening(partial(stopwatch, spent)):
        for n in range(WARM_UP + STEPS):
            if n == WARM_UP:
                world.control.barrier()
                spent.update(dict.fromkeys(spent, 0.0))
                started = time.perf_counter()
            waited = time.perf_counter()
            batch = next(batches)
            spent["data"] += time.perf_counter() - waited
            timed(batch)
    whole = time.perf_counter() - started
    spent["the rest"] = whole - sum(spent.values())
    spent["whole step"] = whole
    return {name: seconds / STEPS for name, seconds in spent.items()}


def unwatched(timed: Step, loader: Loader, world: World) -> tuple[float, float]:
    """Mean seconds per step without a wait in between: what overlaps (w beside members, messages) does overlap. And
    those in which this rank kept a core busy, with all its threads."""
    batches = loader.epoch(1)
    for n in range(WARM_UP + STEPS):
        if n == WARM_UP:
            world.control.barrier()
            started, busy = now_done(world.device), time.process_time()
        timed(next(batches))
    return (now_done(world.device) - started) / STEPS, (time.process_time() - busy) / STEPS


@contextlib.contextmanager
def stopwatch(spent: dict[str, float], name: str) -> Iterator[None]:
    started, inside = time.perf_counter(), sum(spent.values())
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent[name] += time.perf_counter() - started - (sum(spent.values()) - inside)


def bench_step(config: Config, world: World, num_classes: int) -> Step:
    method = Method(config.method)
    if method.asks_teacher:
        raise ValueError(f"method={method.name} needs a teacher, and bench loads none: choose another method")
    return assemble(config, placement_of(config, world.size), world, num_classes, STEPS_PER_EPOCH)[0]


def placement_of(config: Config, num_ranks: int) -> Placement:
    needs_w = Method(config.method).counterpart is not None
    return place(num_ranks, config.ensemble.size, needs_w, ranks_of_w=config.redundancy.ranks)


def cost(config: Config) -> list[dict[str, Any]]:
    """On one rank, with the same members and batch: a bare loop, method=ind, method=dice, and DICE written plainly."""
    size = DEFAULT_SIZE if config.ensemble.size == "auto" else int(config.ensemble.size)
    config = replace(config, ensemble=replace(config.ensemble, size=size))
    world = World(0, 1, pick_device())
    images = torch.randn(config.batch_size, 3, 32, 32, device=world.device)
    labels_B = torch.randint(100, (config.batch_size,), device=world.device)
    last = images.contiguous(memory_format=torch.channels_last)
    batch = Batch(0, 0, len(labels_B), slice(None), labels_B, labels_B, 0, [last])
    ours = {f"method={name}": bench_step(with_method(config, name), world, 100) for name in ("ind", "dice")}
    plainly = replace(with_method(config, "dice"), compile=False)
    alternatives: dict[str, Callable[[], Any]] = {
        "bare PyTorch loop, independent": bare(plainly, size, last, labels_B),
        **{name: functools.partial(one, batch) for name, one in ours.items()},
        "DICE written plainly": plain(plainly, size, images, labels_B),
    }
    return compare(alternatives, "method=ind", rounds=5, theirs=alternatives.keys() - ours.keys())


def with_method(config: Config, name: str, structure: str = "net") -> Config:
    """The config with a method and what its YAML says of a step; ValueError if it has no such structure."""
    other = compose_config([f"method={name}", f"structure={structure}"])
    changed = replace(
        config,
        method=other.method,
        structure=structure,
        redundancy=replace(config.redundancy, scale=other.redundancy.scale),
        data=replace(config.data, per_member=other.data.per_member, noise=other.data.noise),
        optimizer=replace(config.optimizer, ema=other.optimizer.ema, ema_warmup=other.optimizer.ema_warmup),
        trajectory=other.trajectory,
    )
    if other.trajectory["kind"] == "none":
        return changed
    return replace(changed, epochs=other.epochs, schedules=other.schedules)


def bare(config: Config, size: int, images: torch.Tensor, labels_B: torch.Tensor) -> Callable[[], None]:
    method = Method(config.method)
    nets = [build_member(config, method, i, 100).to(images.device) for i in range(size)]
    nets = [net.to(memory_format=torch.channels_last) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True) for net in nets]

    def one_step() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels_B).backward()
            optimizer.step()

    return one_step


def plain(config: Config, size: int, images: torch.Tensor, labels_B: torch.Tensor) -> Callable[[], None]:
    """DICE as a first implementation would be: default memory format, one graph, the literal discriminator."""
    method, settings = Method(config.method), config.redundancy
    nets = [build_member(config, method, i, 100).to(images.device) for i in range(size)]
    parameters = [parameter for net in nets for parameter in net.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    dim = feature_dims(config, 1)[0]
    w = LiteralDiscriminator(size, dim, 100, settings.num_samples, settings.negatives, images.device)

    def one_step() -> None:
        means, scales, loss = [], [], images.new_zeros(())
        for net in nets:
            encoding = net.encode(images, torch.randn(len(images), dim, device=images.device))
            assert net.bottleneck is not None and encoding.scale_BD is not None
            prior_BD = net.bottleneck.prior_KD[labels_B]
            divergence_B = gaussian_divergence(encoding.mean_BD, encoding.scale_BD, prior_BD)
            loss = loss + F.cross_entropy(encoding.logits_BK, labels_B) + 0.1 * divergence_B.mean()
            means.append(encoding.mean_BD)
            scales.append(encoding.scale_BD.detach())
        means_MBD, scales_MBD = torch.stack(means), torch.stack(scales)
        loss = loss + 0.2 / (size - 1) * w.redundancy(means_MBD, scales_MBD, labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.learn(means_MBD.detach(), scales_MBD, labels_B)

    return one_step
