"""All checks of `doctor`, in the order in which people can do something about them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dicedist.config import Config, compose_config
from dicedist.diagnosis import gpus, machine, services
from dicedist.diagnosis.finding import Check, Finding, findings


@dataclass(frozen=True)
class Request:
    config: Config
    ranks: int
    nodes: tuple[str, ...]
    as_json: bool


def parsed(arguments: Sequence[str]) -> Request:
    """--ranks N, --nodes A,B, --json, and the keys of a training."""
    rest, options = [], {"--ranks": "", "--nodes": ""}
    waiting = iter(arguments)
    for word in waiting:
        if word in options:
            options[word] = next(waiting, "")
            if not options[word]:
                raise ValueError(f"{word} needs a value: {word} {'5' if word == '--ranks' else 'gpu1,gpu2'}")
        elif word.startswith("--") and word != "--json":
            raise ValueError(f"{word}: write --ranks N, --nodes A,B, --json, or keys of a training")
        else:
            rest.append(word)
    ranks = options["--ranks"] or str(max(2, torch.cuda.device_count()))
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ValueError(f"--ranks {ranks}: write a number above 0")
    config = compose_config([word for word in rest if word != "--json"])
    names = tuple(name for name in options["--nodes"].split(",") if name)
    return Request(config, int(ranks), names, "--json" in rest)


def examine(request: Request) -> Iterator[Finding]:
    return findings(iter(checks(request)))


def checks(request: Request) -> list[tuple[str, Check]]:
    config, ranks, with_ = request.config, request.ranks, functools.partial
    listed: list[tuple[str, Check]] = [
        ("versions", machine.versions),
        ("driver", gpus.driver),
        ("GPUs", with_(gpus.devices, ranks)),
        ("peer access", gpus.peers),
        ("NCCL", gpus.nccl),
        ("DALI", gpus.dali),
        ("processors", with_(machine.processors, ranks)),
        ("memory", machine.memory),
        ("shared memory", with_(machine.shared_memory, ranks)),
        ("limits", machine.limits),
        ("folder of runs", with_(machine.folder_of_runs, Path(config.run.dir))),
        ("own name", services.own_name),
        ("ports", services.ports),
        *((f"node {name}", with_(services.reaches, name)) for name in request.nodes),
        ("data", with_(services.data_root, config)),
        ("MLflow", with_(services.mlflow_store, config)),
    ]
    return listed + ([("messages", with_(services.ranks_reach_each_other, ranks))] if ranks > 1 else [])
