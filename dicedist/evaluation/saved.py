"""Evaluates what is on disk: a run, whose members are spread over the ranks, or the logits of any ensemble."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dicedist.algorithm.build import build_hosted, build_member, feature_dims, learner
from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import place
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import joined
from dicedist.config import refuse_unknown_sets
from dicedist.config.requests import EvaluateRequest
from dicedist.config.schema import AVERAGES, CalibrationConfig, Config, EvaluateConfig, OodConfig
from dicedist.console.progress import Progress, silent
from dicedist.data import sources
from dicedist.data.ood import refuse_unreadable
from dicedist.data.shift import Shift, open_shift, refuse_severities
from dicedist.data.sources import Source
from dicedist.evaluation.calibration import aimed
from dicedist.evaluation.evaluator import Evaluator, measured
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.fusing import fusing_of
from dicedist.evaluation.members import chosen_members, members_or_student
from dicedist.evaluation.redundancy import load_discriminator
from dicedist.evaluation.shift import measure_shift
from dicedist.metrics import conformal
from dicedist.runs import checkpoint
from dicedist.runs.run import Results, Run


def evaluate_run(run: Run, request: EvaluateRequest) -> tuple[Results, dict[str, Any] | None]:
    """All ranks call this: where the results are kept, and on the reporter the results themselves."""
    found, config, plan = run.checkpoint(), run.config(), run.plan()
    root, trusted = request.data.root or config.data.root, request.data.trusted
    config = replace(
        config,
        data=replace(config.data, root=root, download=False, trusted=trusted),  # a run does not decide where files go
        network=replace(config.network, trusted=request.network.trusted),
    )
    method, size = Method(config.method), plan.num_predictors
    members = members_or_student(request.members, method, size)
    placement = place(world_size(), len(members), needs_discriminator=False)
    mine = [members[place_] for place_ in placement.members_on(this_rank())]
    ood = OodConfig({**config.ood.sets, **request.ood.sets}, {**config.ood.groups, **request.ood.groups})
    refuse_unreadable(request.ood.measured, plan.input_shape[0] if plan.reads_vectors else None)
    refuse_unknown_sets(request.ood, {**config.ood.sets, **(run.result() or {}).get("ood", {})})
    targets = aimed(config.calibration, asdict(request.calibration))
    if request.shift is not None:
        refuse_severities(request.shift_severities)
    source = normalised_as_trained(sources.load(config.data), found)
    shift = None
    if request.shift is not None:
        shift = open_shift(request.shift, request.shift_severities, request.shift_limit, source, config.data.root)
    if request.calibration.alpha is not None:
        refuse_too_few(source, targets)
    with joined(config.distributed.timeout) as world:
        dims = feature_dims(config, plan)
        trained = build_hosted(config, method, plan, [0], False, source.num_classes, world.device)
        modules = {n: build_member(config, method, plan, n // plan.samples, source.num_classes) for n in mine}
        parts = {n: learner(config.predictor_part(n), module, config, world.device) for n, module in modules.items()}
        hosted = replace(trained, members=parts)
        checkpoint.restore(found, hosted.parts)
        own = found if world.reports else None
        fusing = fusing_of(
            config, method, plan, members, placement.host_of, world.control, source.num_classes, world.device, own
        )
        evaluator = Evaluator(
            hosted.averaged if config.uses_average else hosted,
            members,
            placement.host_of,
            world.control,
            world.device,
            source,
            load_discriminator(config, method, plan, source.num_classes, found) if world.reports else None,
            [dims[member // plan.samples] for member in members],
            found.step,
            method.student(size),
            request.estimator == "fresh",
            Progress if world.reports else silent,
            fusing,
        )
        settings = replace(
            config.evaluate,
            average=request.average or config.evaluate.average,
            folds=request.folds or config.evaluate.folds,
        )
        findings = evaluator.evaluate(settings, OodConfig(ood.measured, ood.groups), targets, config.data.root)
        if shift is not None:
            add_shift(findings, str(request.shift), evaluator, shift, settings.average)
    results = results_for(run, request, members, settings, config, size)
    return results, None if findings is None else findings.save(results, dropped=ood.left_out)


def add_shift(findings: Findings | None, name: str, evaluator: Evaluator, shift: Shift, average: str) -> None:
    """All ranks call this; the reporter, which has the findings, adds what was measured on shifted images."""
    calibrated = findings.result.get("calibration") if findings else None
    shifted = measure_shift(evaluator, shift, average, calibrated["temperature"] if calibrated else None)
    if findings is not None:
        findings.result["shift"] = {name: shifted}


def normalised_as_trained(source: sources.Source, found: checkpoint.Checkpoint) -> sources.Source:
    """A checkpoint from before this was kept has the normalisation of the data."""
    kept = found.about.get("source")
    if kept is not None and len(kept["class_names"]) != source.num_classes:
        raise ValueError(
            f"the run was trained on {len(kept['class_names'])} classes, and the {source.kind} of data.root have "
            f"{source.num_classes}: name the data of the run"
        )
    return source if kept is None else replace(source, mean=tuple(kept["mean"]), std=tuple(kept["std"]))


def refuse_too_few(source: Source, targets: CalibrationConfig) -> None:
    """Before anything is read: whether sets of labels at this alpha can be made from so many images."""
    labels_N = source.test.labels_N if targets.source == "test" else source.val.labels_N
    counts = labels_N.bincount(minlength=source.num_classes).tolist() if targets.per_class else [len(labels_N)]
    conformal.place(min(counts), targets.alpha)


def results_for(
    run: Run, request: EvaluateRequest, members: list[int], settings: EvaluateConfig, config: Config, size: int
) -> Results:
    """The run's own folder for what its training would find; anything else goes beside it."""
    if request.output:
        return Results(request.output)
    label = []
    if len(members) < size:
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
        "ood_groups": {},
        "ood_missing": [],
    }
    results = Results(request.output or path.with_name(f"{path.stem}-evaluation"))
    results.write_result(result)
    return results, result


def read_logits(path: Path) -> tuple[Tensor, Tensor]:
    try:
        if not path.is_file():
            raise ValueError("not a plain file")  # a pipe would never end
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            return tensors["logits"], tensors["labels"]
        with np.load(path, allow_pickle=False) as file:
            return torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
    except Exception as error:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
        raise ValueError(f"{path}: not an .npz or .safetensors with logits [M, N, K] and labels [N]") from error
