"""Evaluate a run on disk; its members are spread over the ranks."""

from dataclasses import asdict, replace
from typing import Any

from dicedist.algorithm.objectives import Method
from dicedist.cluster.heartbeat import computing
from dicedist.cluster.placement import REPORTER, place
from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import joined
from dicedist.config import refuse_unknown_sets
from dicedist.config.plan import Plan
from dicedist.config.requests import EvaluateRequest
from dicedist.config.schema import CalibrationConfig, Config, OodConfig
from dicedist.console.lines import warn
from dicedist.console.progress import Progress, silent
from dicedist.data import sources
from dicedist.data.ood import refuse_unreadable
from dicedist.data.prepared import refuse_unwritable
from dicedist.data.shift import open_shift, refuse_severities
from dicedist.data.sources import Source
from dicedist.evaluation.about import About, described
from dicedist.evaluation.calibration import aimed
from dicedist.evaluation.ensemble import as_in_training
from dicedist.evaluation.evaluator import Evaluator
from dicedist.evaluation.loading import (
    behind_frozen_trunk,
    describe,
    load_heads,
    load_shard,
    members_or_student,
    read_checkpoint,
)
from dicedist.evaluation.shift import add_shift
from dicedist.metrics import conformal
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.results import Results, origin
from dicedist.runs.run import Run


@computing()
def evaluate_run(run: Run, request: EvaluateRequest) -> tuple[Results, dict[str, Any] | None]:
    """Evaluate a run. Return the folder of the results, and on rank 0 the results. All ranks call this."""
    found = run.checkpoint(warn if this_rank() == REPORTER else lambda text: None, request.checkpoint)
    config, plan = run.config(), run.plan()
    data = sources.of_run(config.data, request.data.root, request.data.trusted)
    config = replace(config, data=data, network=replace(config.network, trusted=request.network.trusted))
    method = Method(config.method)
    members = members_or_student(request.members, method, plan.num_predictors)
    placement = place(world_size(), len(members), needs_discriminator=False)
    ood, targets = ood_sets(run, request, config, plan, found), aimed(config.calibration, asdict(request.calibration))
    average, folds = request.average or config.evaluate.average, request.folds or config.evaluate.folds
    some = members if len(members) < plan.num_predictors else None
    results = results_for(run, request, some, average, folds, targets, config)
    refuse_unwritable(results.directory, "write output=FOLDER")
    source = sources.load(config.data)
    inputs = found.about.get("source") or described(source)  # older checkpoints lack it
    about = describe(config, method, plan, run.name, found.step, inputs, members, request.average)
    refuse_other_classes(about, source)
    shift = None
    if request.shift is not None:
        shift = open_shift(request.shift, request.shift_severities, request.shift_limit, source, config.data.root)
    if request.calibration.alpha is not None:
        refuse_too_few(source, targets)
    with joined(config.distributed.timeout) as world:

        def read(found: Checkpoint) -> Evaluator:
            held, stage = placement.members_on(this_rank()), Progress if world.reports else silent
            shard = load_shard(replace(about, step=found.step), config, found, held, config.network.trusted)
            shard = as_in_training(shard.to(world.device))
            w = load_heads(shard, config, method, plan, found, source.num_classes) if world.reports else None
            student = method.student(plan.num_predictors)
            return Evaluator(shard, source, world.control, placement.host_of, stage, w, student)

        found, evaluator = read_checkpoint(run, found, read, request.checkpoint, world.control)
        evaluator = replace(evaluator, source=behind_frozen_trunk(evaluator.ensemble, config, plan, source))
        fresh = request.estimator == "fresh"
        findings = evaluator.evaluate(folds, OodConfig(ood.measured, ood.groups), targets, config.data.root, fresh)
        if shift is not None:
            add_shift(findings, str(request.shift), evaluator, shift)
    if findings is None:
        return results, None
    findings.result |= origin(config, found)
    return findings.save(results, dropped=ood.left_out)


def ood_sets(run: Run, request: EvaluateRequest, config: Config, plan: Plan, found: Checkpoint) -> OodConfig:
    """Return the OOD sets of the run and of the request; refuse sets and severities that cannot be read."""
    columns = found.about.get("source", {}).get("columns")
    refuse_unreadable(request.ood.measured, plan.input_shape, columns)
    refuse_unknown_sets(request.ood, {**config.ood.sets, **(run.result() or {}).get("ood", {})})
    if request.shift is not None:
        refuse_severities(request.shift_severities)
    return OodConfig({**config.ood.sets, **request.ood.sets}, {**config.ood.groups, **request.ood.groups})


def refuse_other_classes(about: About, source: Source) -> None:
    if len(about.class_names) != source.num_classes:
        raise ValueError(
            f"the run was trained on {len(about.class_names)} classes, and the {source.kind} of data.root have "
            f"{source.num_classes}: write data.root=FOLDER of the run's data"
        )


def refuse_too_few(source: Source, targets: CalibrationConfig) -> None:
    """Raise a ValueError if there are too few inputs for label sets at this alpha, before anything is read."""
    labels_N = source.test.labels_N if targets.source == "test" else source.val.labels_N
    counts = labels_N.bincount(minlength=source.num_classes).tolist() if targets.per_class else [len(labels_N)]
    conformal.place(min(counts), targets.alpha)


def results_for(
    run: Run,
    request: EvaluateRequest,
    members: list[int] | None,
    average: str,
    folds: int,
    targets: CalibrationConfig,
    config: Config,
) -> Results:
    """Return the run's own folder for its own settings, and a folder next to it for others. members: None for all."""
    if request.output:
        return Results(request.output)
    label = []
    if members is not None:
        label.append(f"members-{'-'.join(map(str, members))}")
    if request.checkpoint == "last" and config.checkpoint.best:
        label.append("checkpoint-last")
    if average != config.evaluate.average:
        label.append(f"average-{average}")
    if folds != config.evaluate.folds:
        label.append(f"folds-{folds}")
    own = asdict(config.calibration)
    label += [f"{key}-{value}" for key, value in asdict(targets).items() if value not in (own[key], None)]
    return run.variation("_".join(label)) if label else run
