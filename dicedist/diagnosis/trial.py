"""A few steps of a training over the ranks of this machine, written down so that two of them can be compared.

Run by trials.py: `python -m dicedist.launch --nproc_per_node=N -m dicedist.diagnosis.trial FILE STEPS key=value`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from dicedist.algorithm.objectives import Method
from dicedist.cluster.assembly import assemble
from dicedist.cluster.placement import place
from dicedist.cluster.process import command, this_rank, tune_malloc, world_size
from dicedist.cluster.world import joined
from dicedist.config import compose_config
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
    config.ensemble.size = placement.num_members
    members = placement.members_on(this_rank())
    source = sources.load(config.data, labels_only=not members)
    per_epoch = num_batches(len(source.train), config.batch_size)
    with joined(config.distributed.timeout, placement.parts) as world, SameDraws():
        step, _ = assemble(config, placement, world, source.num_classes, per_epoch)
        replica, replicas = placement.replica_on(world.rank), placement.replicas if members else 1
        loader = Loader(
            source.train, config.data, source, config.batch_size, config.seed, world.device, members, replica, replicas
        )
        values = []
        for nth in range(int(steps)):
            if nth % per_epoch == 0:
                batches = loader.epoch(nth // per_epoch)
            values.append({name: float(value) for name, value in step(next(batches)).values.items()})
        loader.close()
        by_rank = [record["values"] for record in world.control.report({"values": values})]
        if world.reports:
            Path(file).write_text(json.dumps(by_rank))


if __name__ == "__main__":
    command(run)
