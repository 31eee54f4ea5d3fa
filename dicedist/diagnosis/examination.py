"""All checks of `doctor`, in the order in which users can act on them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dicedist.config import Config
from dicedist.diagnosis import gpus, machine, services
from dicedist.diagnosis.finding import Check


def checks(config: Config, ranks: int, nodes: Sequence[str]) -> dict[str, Check]:
    """Return the checks by name. nodes: HOST or HOST:PORT of other nodes."""
    return {
        "versions": machine.versions,
        "driver": gpus.driver,
        "GPUs": partial(gpus.devices, ranks),
        "peer access": gpus.peers,
        "NCCL": gpus.nccl,
        "DALI": gpus.dali,
        "processors": partial(machine.processors, ranks),
        "memory": machine.memory,
        "shared memory": partial(machine.shared_memory, ranks),
        "limits": machine.limits,
        "folder of runs": partial(machine.folder_of_runs, Path(config.run.dir)),
        "own name": services.own_name,
        "ports": services.ports,
        **{f"node {name}": partial(services.reaches, name) for name in nodes},
        "data": partial(services.data_root, config),
        "bucket": partial(services.bucket, config),
        "MLflow": partial(services.mlflow_store, config),
        "messages": partial(services.ranks_reach_each_other, ranks),
    }
