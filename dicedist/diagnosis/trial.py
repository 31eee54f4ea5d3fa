"""Run a few steps of short trainings over the ranks of this machine, and write their values for comparisons.

Run by trials.py: `python -m dicedist.launch --nproc_per_node=N -m dicedist.diagnosis.trial FILE STEPS CASES`, with the
cases as JSON.
"""

import contextlib
import gc
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicedist.algorithm.batch import Batch
from dicedist.algorithm.build import Extent
from dicedist.algorithm.footprint import footprint
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.step import Step
from dicedist.cluster.assembly import assemble, placed
from dicedist.cluster.placement import Placement
from dicedist.cluster.process import command, tune_malloc, world_size
from dicedist.cluster.world import World, joined
from dicedist.config import Config, compose_config
from dicedist.config.plan import Plan
from dicedist.data import sources
from dicedist.data.augmentation import to_device
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source
from dicedist.diagnosis.same_draws import SameDraws

TIMEOUT = 120.0
WARM_UP = 2  # steps in which the host may wait: kernels are loaded and optimizers create their states
Values = Mapping[str, Tensor | float]


@dataclass(frozen=True)
class Case:
    """A training. By default it uses the CPU's images and random numbers on any device, and reads every value."""

    keys: tuple[str, ...]
    dtype: str = "float64"
    disturbed: float | None = None  # also train a twin whose weights differ by this share
    in_a_row: bool = False  # read nothing before the last step; use the device's own images and random numbers
    refuses_waits: bool = False  # a wait of the host for the GPU inside a step is an error


def run(arguments: Sequence[str]) -> None:
    file, steps, text = arguments
    tune_malloc()
    cases = [Case(**{**case, "keys": tuple(case["keys"])}) for case in json.loads(text)]
    config = compose_config(cases[0].keys)
    with joined(TIMEOUT, placed(config, Method(config.method), world_size()).parts) as world:
        found = [world.control.report(follow(case, int(steps), world)) for case in cases]
        if world.reports:
            Path(file).write_text(json.dumps(found))


def follow(case: Case, num_steps: int, world: World) -> dict[str, Any]:
    """Train. Return the values of each step on this rank, the twin's values, and the memory. All ranks call this."""
    config, draws = compose_config(case.keys), contextlib.nullcontext() if case.in_a_row else SameDraws()
    method = Method(config.method)
    placement = placed(config, method, world_size())
    members = placement.members_on(world.rank)
    source = sources.load(config.data, labels_only=not members)
    forget_the_peak(world.device)
    with in_dtype(getattr(torch, case.dtype)), draws:
        steps = [built(config, placement, world, source) for _ in range(1 + (case.disturbed is not None))]
        for twin in steps[1:]:
            disturb(twin, case.disturbed or 0.0)
        outcomes, given = list[list[Values]](), batches(case, config, placement, world, source)
        for nth in range(num_steps):
            with refusing_waits(case.refuses_waits and nth >= WARM_UP):
                batch = next(given)
                values: list[Values] = [step(batch).values for step in steps]
            outcomes.append(values if case.in_a_row else [as_numbers(own) for own in values])
        given.close()
    plan = plan_of(config, placement, source)
    said = footprint(config, method, plan, members, world.rank in placement.discriminators, source.num_classes)
    followed = [[as_numbers(values) for values in own] for own in zip(*outcomes, strict=True)]
    return {"values": followed[0], "disturbed": followed[-1], "bytes": taken(steps[0], sum(said.values()))}


def plan_of(config: Config, placement: Placement, source: Source) -> Plan:
    return Plan.of(config, placement.num_members, tuple(source.shape))


def built(config: Config, placement: Placement, world: World, source: Source) -> Step:
    extent = Extent(source.num_classes, num_batches(len(source.train), config.batch_size))
    return assemble(config, Method(config.method), plan_of(config, placement, source), placement, world, extent)


def batches(
    case: Case, config: Config, placement: Placement, world: World, source: Source
) -> Generator[Batch, None, None]:
    """Yield the batches of all epochs in the dtype of the case, prepared on the CPU unless the case is in a row."""
    read_on, dtype = world.device if case.in_a_row else torch.device("cpu"), getattr(torch, case.dtype)
    with contextlib.closing(Loader.of(config, source, placement, world.rank, read_on)) as loader:
        for batch in loader.endless():
            labels_B, *images = (to_device(t, world.device) if t.is_cpu else t for t in (batch.labels_B, *batch.images))
            yield replace(batch, labels_B=labels_B, images=[view.to(dtype) for view in images])


def as_numbers(values: Values) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@torch.no_grad()
def disturb(step: Step, share: float) -> None:
    """Add or subtract this share of every weight."""
    for nth, part in enumerate(step.hosted.parts):
        draws = generator("cpu", 0, "disturbance", nth)
        for parameter in part.module.parameters():
            signs = 2.0 * torch.randint(2, parameter.shape, generator=draws) - 1
            parameter.mul_(1 + share * signs.to(parameter))


@contextlib.contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def refusing_waits(refused: bool) -> Iterator[None]:
    if refused:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if refused:
            torch.cuda.set_sync_debug_mode("default")


def forget_the_peak(device: torch.device) -> None:
    """Free the memory of the previous case."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def taken(step: Step, said: int) -> dict[str, int]:
    """Return bytes: of the start table, of weights, gradients and states after a step, and on a GPU the peak."""
    held = 0
    for part in step.hosted.parts:
        modules = [part.module, *([part.average] if part.average else [])]
        states = [state for optimizer in part.optimizers.values() for state in optimizer.state.values()]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors += [parameter for parameter in part.module.parameters() if parameter.requires_grad]  # their gradients
        held += sum(tensor.nbytes for tensor in tensors)
    peak = {"peak": torch.cuda.max_memory_allocated(step.device)} if step.device.type == "cuda" else {}
    return {"said": said, "held": held, **peak}


if __name__ == "__main__":
    command(run)
