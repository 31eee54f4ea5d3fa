"""Evaluates what is on disk: a run, whose members are spread over the ranks, or the logits of any ensemble."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dicedist.algorithm.build import build_hosted, feature_dims
from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import place
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import joined
from dicedist.config.requests import EvaluateRequest
from dicedist.config.schema import AVERAGES, Config, EvaluateConfig, OodConfig
from dicedist.console.progress import Progress, silent
from dicedist.data import sources
from dicedist.data.ood import refuse_unreadable
from dicedist.evaluation.evaluator import Evaluator, measured
from dicedist.evaluation.members import chosen_members, members_or_student
from dicedist.evaluation.redundancy import load_discriminator
from dicedist.runs import checkpoint
from dicedist.runs.run import Results, Run


def evaluate_run(run: Run, request: EvaluateRequest) -> tuple[Results, dict[str, Any] | None]:
    """All ranks call this: where the results are kept, and on the reporter the results themselves."""
    found, config = run.checkpoint(), run.config()
    config.data.root = request.data.root or config.data.root
    config.data.download = False  # a run's config does not decide where files are put
    config.network.trusted = request.network.trusted
    method, size = Method(config.method), config.num_members
    members = members_or_student(request.members, method, size)
    placement = place(world_size(), len(members), needs_discriminator=False)
    mine = [members[place_] for place_ in placement.members_on(this_rank())]
    ood = OodConfig({**config.ood.sets, **request.ood.sets})
    refuse_unreadable(request.ood.sets)
    source = sources.load(config.data)
    with joined(config.distributed.timeout) as world:
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
            found.step,
            method.student(size),
            request.estimator == "fresh",
            Progress if world.reports else silent,
        )
        settings = replace(
            config.evaluate,
            average=request.average or config.evaluate.average,
            folds=request.folds or config.evaluate.folds,
        )
        findings = evaluator.evaluate(settings, ood, config.data.root)
    results = results_for(run, request, members, settings, config)
    return results, None if findings is None else findings.save(results)


def results_for(
    run: Run, request: EvaluateRequest, members: list[int], settings: EvaluateConfig, config: Config
) -> Results:
    """The run's own folder for what its training would find; anything else goes beside it."""
    if request.output:
        return Results(request.output)
    label = []
    if len(members) < config.num_members:
        label.append(f"members-{'-'.join(map(str, members))}")
    if settings.average != config.evaluate.average:
        label.append(f"average-{settings.average}")
    if settings.folds != config.evaluate.folds:
        label.append(f"folds-{settings.folds}")
    return run.variation("_".join(label)) if label else run


def evaluate_logits(path: Path, request: EvaluateRequest) -> tuple[Results, dict[str, Any]]:
    logits_MNK, labels_N = read_logits(path)
    if request.members is not None and not isinstance(request.members, list):
        raise ValueError(f"members={request.members}: write numbers like [0,2]")
    members = chosen_members(request.members, len(logits_MNK))
    average = request.average or AVERAGES[0]
    result = {
        "member_ids": members,
        "average": average,
        **measured(logits_MNK[members], labels_N, average, request.folds or 1),
        "redundancy": None,
        "ood": {},
        "ood_missing": [],
    }
    results = Results(request.output or path.with_name(f"{path.stem}-evaluation"))
    results.write_result(result)
    return results, result


def read_logits(path: Path) -> tuple[Tensor, Tensor]:
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            return tensors["logits"], tensors["labels"]
        with np.load(path, allow_pickle=False) as file:
            return torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
    except Exception as error:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
        raise ValueError(f"{path}: not an .npz or .safetensors with logits [M, N, K] and labels [N]") from error
