"""Measure an ensemble: accuracy, calibration, uncertainty, diversity, redundancy, OOD detection.

Examples:
    python -m dicedist.evaluate run=runs/NAME                          a run, finished or stopped
    python -m dicedist.evaluate run=runs/NAME members=[0,2]            some of its members
    python -m dicedist.evaluate run=runs/NAME average=probabilities folds=5
    python -m dicedist.evaluate run=runs/NAME estimator=fresh          redundancy by a new estimator, to compare runs
    python -m dicedist.evaluate logits=FILE.npz                        any ensemble: logits [M, N, K] and labels [N]
    torchrun --nproc_per_node=4 -m dicedist.evaluate run=runs/NAME     members dealt over ranks
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dicedist import checkpoint
from dicedist.assessment import Assessor, measured, show
from dicedist.config import Config, EvaluateConfig, OodConfig, compose_typed, load_config, show_help
from dicedist.data import sources
from dicedist.discriminator import Discriminator
from dicedist.exchange import build_exchange
from dicedist.objectives import Method
from dicedist.parts import build_discriminator, build_hosted, feature_dims
from dicedist.placement import place
from dicedist.world import command, joined, keep_memory, this_rank, world_size

DISTRIBUTED_TIMEOUT = 1800.0  # a rank may have several members to read while another waits


@dataclass
class DataRoot:
    root: str | None


@dataclass
class Trust:
    trusted: bool


@dataclass
class Request:
    run: str | None
    logits: str | None
    members: list[int] | None
    average: str
    folds: int
    estimator: str  # own | fresh
    output: str | None
    ood: OodConfig
    data: DataRoot
    network: Trust


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "evaluate")
        return
    request = compose_typed("evaluate", arguments, Request)
    if (request.run is None) == (request.logits is None):
        raise ValueError("write run=runs/NAME, or logits=FILE.npz")
    if request.average not in ("logits", "probabilities"):
        raise ValueError(f"average={request.average}: write logits or probabilities")
    if request.estimator not in ("own", "fresh"):
        raise ValueError(f"estimator={request.estimator}: write own or fresh")
    if request.logits is not None:
        evaluate_logits(Path(request.logits), request)
    else:
        assert request.run is not None
        evaluate_run(Path(request.run), request)


def evaluate_run(directory: Path, request: Request) -> None:
    keep_memory()
    config, found = open_run(directory)
    config.data.root = request.data.root or config.data.root
    config.network.trusted = request.network.trusted
    size = config.ensemble.size
    assert isinstance(size, int)
    members = chosen_members(request.members, size)
    method = Method(config.method)
    ranks = world_size()
    placement = place(ranks, len(members), needs_discriminator=False)
    mine = [members[place_] for place_ in placement.members_on(this_rank())]
    source = sources.load(config.data)
    with joined(DISTRIBUTED_TIMEOUT) as world:
        hosted = build_hosted(config, method, mine, False, size, source.num_classes, world.device)
        checkpoint.restore(found, hosted.parts)
        dims = [feature_dims(config, size)[member] for member in members]
        exchange = build_exchange(placement, world, method, dims, source.num_classes)
        w = load_discriminator(config, method, size, source.num_classes, found) if world.rank == 0 else None
        assessor = Assessor(hosted, members, exchange, source, w, dims, method.student(size))
        settings = EvaluateConfig(request.average, request.folds, every_epochs=1)
        ood = OodConfig({**config.ood.sets, **request.ood.sets})
        output = Path(request.output) if request.output else directory
        if request.estimator == "fresh":
            assessor.estimator = config.redundancy
        assessor.assess(settings, ood, config.data.root, output, print)


def open_run(directory: Path) -> tuple[Config, checkpoint.Checkpoint]:
    """The config and the last intact checkpoint of a run."""
    if not (directory / "config.yaml").is_file():
        raise ValueError(f"{directory} is not a run: it has no config.yaml (runs are folders under runs/)")
    found = checkpoint.newest(directory)
    if found is None:
        raise ValueError(f"{directory} has no intact checkpoint{checkpoint.what_is_wrong(directory)}")
    return load_config(directory / "config.yaml"), found


def chosen_members(wanted: list[int] | None, size: int) -> list[int]:
    if wanted is None:
        return list(range(size))
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(size)):
        raise ValueError(f"members={wanted}: the run has members 0 to {size - 1}, name some of them once each")
    return sorted(wanted)


def load_discriminator(
    config: Config, method: Method, size: int, num_classes: int, found: checkpoint.Checkpoint
) -> Discriminator | None:
    if method.redundancy is None:
        return None
    w = build_discriminator(config, method, size, num_classes)
    checkpoint.load_weights(w, checkpoint.load_part(found, "discriminator", w))
    return w


def evaluate_logits(path: Path, request: Request) -> None:
    logits_MNK, labels_N = read_logits(path)
    members = chosen_members(request.members, len(logits_MNK))
    result = {
        "member_ids": members,
        "average": request.average,
        **measured(logits_MNK[members], labels_N, request.average, request.folds),
        "redundancy": None,
        "ood": {},
        "ood_missing": [],
    }
    output = Path(request.output) if request.output else path.parent
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(result, indent=1))
    print(show(result))


def read_logits(path: Path) -> tuple[Tensor, Tensor]:
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            return tensors["logits"], tensors["labels"]
        with np.load(path, allow_pickle=False) as file:
            return torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, SafetensorError) as error:
        raise ValueError(
            f"{path}: not an .npz or .safetensors with logits [M, N, K] and labels [N] ({error})"
        ) from error


if __name__ == "__main__":
    command(run)
