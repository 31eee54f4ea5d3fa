"""A few steps of a training over the ranks of this machine, written down so that two of them can be compared.

Run by trials.py: `python -m dicedist.launch --nproc_per_node=N -m dicedist.diagnosis.trial FILE STEPS key=value`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dicedist.algorithm.build import Extent
from dicedist.algorithm.footprint import footprint
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.step import Step
from dicedist.cluster.assembly import assemble
from dicedist.cluster.placement import place
from dicedist.cluster.process import command, this_rank, tune_malloc, world_size
from dicedist.cluster.world import joined
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.data import sources
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader
from dicedist.diagnosis.same_draws import SameDraws


def run(arguments: Sequence[str]) -> None:
    file, steps, *keys = arguments
    tune_malloc()
    config = compose_config(keys)
    method = Method(config.method)
    placement = place(world_size(), config.ensemble.size, method.counterpart is not None, config.ensemble.replicas)
    members = placement.members_on(this_rank())
    source = sources.load(config.data, labels_only=not members)
    per_epoch = num_batches(len(source.train), config.batch_size)
    with joined(config.distributed.timeout, placement.parts) as world, SameDraws():
        plan, extent = (
            Plan.of(config, placement.num_members, tuple(source.shape)),
            Extent(source.num_classes, per_epoch),
        )
        step = assemble(config, method, plan, placement, world, extent)
        replica, replicas = placement.replica_on(world.rank), placement.replicas if members else 1
        loader = Loader(
            source.train,
            config.data,
            source,
            config.batch_size,
            config.seed,
            world.device,
            members,
            replica,
            replicas,
            config.loss.mixes,
        )
        values = []
        for nth in range(int(steps)):
            if nth % per_epoch == 0:
                batches = loader.epoch(nth // per_epoch)
            values.append({name: float(value) for name, value in step(next(batches)).values.items()})
        loader.close()
        said = footprint(config, method, plan, members, world.rank in placement.discriminators, source.num_classes)
        by_rank = world.control.report({"values": values, "bytes": taken(step, sum(said.values()))})
        if world.reports:
            Path(file).write_text(json.dumps(by_rank))


def taken(step: Step, said: int) -> dict[str, int]:
    """Bytes: as the start table says, in weights, gradients and states after a step, and on a GPU the most at once."""
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
