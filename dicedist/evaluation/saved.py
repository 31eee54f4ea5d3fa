"""Evaluates what is on disk: a run, whose members are spread over the ranks, or the logits of any ensemble."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dicedist.algorithm.build import build_hosted, feature_dims
from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import place
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import joined
from dicedist.config.requests import EvaluateRequest
from dicedist.config.schema import EvaluateConfig, OodConfig
from dicedist.data import sources
from dicedist.evaluation.evaluator import Evaluator, measured
from dicedist.evaluation.members import chosen_members
from dicedist.evaluation.redundancy import load_discriminator
from dicedist.runs import checkpoint
from dicedist.runs.run import Results, Run

DISTRIBUTED_TIMEOUT = 1800.0  # seconds: a rank may have several members to read while another waits


def evaluate_run(run: Run, request: EvaluateRequest) -> dict[str, Any] | None:
    """All ranks call this; the reporter gets the results, the others None."""
    found, config = run.checkpoint(), run.config()
    config.data.root = request.data.root or config.data.root
    config.network.trusted = request.network.trusted
    method, size = Method(config.method), config.num_members
    members = chosen_members(request.members, size)
    placement = place(world_size(), len(members), needs_discriminator=False)
    mine = [members[place_] for place_ in placement.members_on(this_rank())]
    source = sources.load(config.data)
    with joined(DISTRIBUTED_TIMEOUT) as world:
        hosted = build_hosted(config, method, mine, False, size, source.num_classes, world.device)
        checkpoint.restore(found, hosted.parts)
        evaluator = Evaluator(
            hosted,
            members,
            placement.host_of,
            world.control,
            world.device,
            source,
            load_discriminator(config, method, source.num_classes, found) if world.reports else None,
            [feature_dims(config, size)[member] for member in members],
            method.student(size),
            config.redundancy if request.estimator == "fresh" else None,
        )
        settings = EvaluateConfig(request.average, request.folds, every_epochs=1)
        ood = OodConfig({**config.ood.sets, **request.ood.sets})
        results = Results(request.output) if request.output else run
        return evaluator.evaluate(settings, ood, config.data.root, results)


def evaluate_logits(path: Path, request: EvaluateRequest) -> dict[str, Any]:
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
    Results(request.output or path.parent).write_result(result)
    return result


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
