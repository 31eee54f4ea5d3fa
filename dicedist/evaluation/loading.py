"""Load the ensemble of a run's checkpoint; the training images are not needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from dicedist.algorithm.build import sizes
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.objectives import Method
from dicedist.cluster.control import ALONE, Control
from dicedist.config.plan import Plan
from dicedist.config.requests import EnsembleRequest
from dicedist.config.schema import AVERAGES, Config
from dicedist.console.lines import warn
from dicedist.data import sources
from dicedist.data.sources import Source
from dicedist.evaluation import calibration
from dicedist.evaluation.about import OPTIONS, VECTORS, About, described
from dicedist.evaluation.ensemble import IMAGES, Ensemble, restored
from dicedist.evaluation.redundancy import saved_w, weights_of_w
from dicedist.metrics.ood_scores import KNN
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import AVERAGED_WEIGHTS, WEIGHTS, Checkpoint
from dicedist.runs.pretrained import read_once
from dicedist.runs.results import Results
from dicedist.runs.run import Run

ATTEMPTS = 5  # to read a checkpoint before a training removes it
T = TypeVar("T")


def load_ensemble(
    run: Run | str | Path,
    members: Any = None,
    average: str | None = None,
    images: str = "uint8",
    trusted: bool = False,
    tell: Callable[[str], None] = warn,
    asked: Mapping[str, Any] | None = None,
    which: str | None = None,
) -> Ensemble:
    """Load the ensemble of a run. members: None for all, numbers, or "student". average: None for the run's own.

    tell: receives warnings. asked: calibration targets that differ from the run's. which: see `Run.checkpoint`.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    config, plan = run.config(), run.plan()
    method = Method(config.method)

    def read(found: Checkpoint) -> Ensemble:
        inputs = inputs_and_classes(config, found)
        about = describe(config, method, plan, run.name, found.step, inputs, members, average, images)
        weights = member_weights(about, config, found, range(len(about.members)), ("encoder", "classifier"))
        weights |= head_weights(about, config, method, found)
        about, bank = calibrated(run, config, found, about, asked or {}, tell)
        return restored(about, trusted, weights | bank, found.path)

    _, ensemble = read_checkpoint(run, run.checkpoint(tell, which), read, which)
    if ensemble.about.fusion is not None:
        tell(
            f"{run} has a fused classifier, which gives fused_label and fused_probabilities; label, confidence and all "
            "calibrated fields come from the members' mean"
        )
    return ensemble


def load_requested(run: Run, request: EnsembleRequest, images: str = "uint8") -> Ensemble:
    """Load the ensemble that the keys of a command name."""
    asked, trusted = asdict(request.calibration), request.network.trusted
    return load_ensemble(run, request.members, request.average, images, trusted, asked=asked, which=request.checkpoint)


def read_checkpoint(
    run: Run, found: Checkpoint, read: Callable[[Checkpoint], T], which: str | None, control: Control = ALONE
) -> tuple[Checkpoint, T]:
    """Read the checkpoint that rank 0 has found. All ranks call this.

    A training that is still running may remove the checkpoint; then the next one is read.
    """
    for attempt in range(1, ATTEMPTS + 1):
        path, value = checkpoint.path_of(run.checkpoints, control.broadcast({"step": found.step})["step"]), None
        try:
            found = found if found.path == path else checkpoint.read(path)
            value = read(found)
        except ValueError:
            if path.exists() or attempt == ATTEMPTS:
                raise
        if not control.maximum(value is None):
            break
        found = run.checkpoint(which=which)
    assert value is not None
    return found, value


def load_shard(about: About, config: Config, found: Checkpoint, held: Sequence[int], trusted: bool) -> Ensemble:
    """Load the members at some places, to evaluate them on this rank."""
    weights = member_weights(about, config, found, held, ("encoder", "classifier", "bottleneck.scale"))
    return restored(about, trusted, weights, found.path, held)


def behind_frozen_trunk(shard: Ensemble, config: Config, plan: Plan, source: Source) -> Source:
    """Replace the images by the outputs of a frozen trunk, computed once for all evaluations."""
    if not (config.network.freezes_trunk and shard.held):
        return source
    trunk, shard.trunk = shard.trunk, nn.Identity()
    source = replace(source, mean=tuple(shard.about.mean), std=tuple(shard.about.std))
    return read_once(source, config, plan, trunk)


def load_heads(
    shard: Ensemble, config: Config, method: Method, plan: Plan, found: Checkpoint, num_classes: int
) -> Discriminator | None:
    """Load the parts that read all members together. Rank 0 calls this.

    The shard gets the heads that predict. Return the w that estimates redundancy; None if the method has none.
    """
    shard.with_heads(head_weights(shard.about, config, method, found))
    return saved_w(config, method, plan, found, num_classes)


def describe(
    config: Config,
    method: Method,
    plan: Plan,
    run: str,
    step: int,
    inputs: Mapping[str, Any],
    members: Any = None,
    average: str | None = None,
    images: str = "uint8",
) -> About:
    """Describe some members of a run, by default all, before calibration. inputs: class_names, mean and std."""
    size = plan.num_predictors
    chosen = members_or_student(members, method, size)
    average = average or config.evaluate.average
    for name, value, known in (("images", images, IMAGES), ("average", average, AVERAGES)):
        if value not in known:
            raise ValueError(f"{name}={value}: write {' or '.join(known)}")
    of_members = config.network.per_member or [config.network.name] * plan.num_members
    names = [name for name in of_members for _ in range(plan.samples)]
    known_to_w = method.compared(size) if method.estimator else ()
    compared = [place for place, number in enumerate(chosen) if number in known_to_w]
    return About(
        run=run,
        step=step,
        members=chosen,
        networks=[names[number] for number in chosen],
        target=None if config.network.per_member else config.network._target_,
        trunk=names[0] if config.structure == "branch" else None,
        compared=compared if len(compared) > 1 else [],
        conditional=bool(method.estimator and method.estimator.conditional),
        size=config.data.size,
        images=VECTORS if plan.reads_vectors else images,
        average=average,
        temperature=1.0,
        fusion=fusion_of(config, method, plan, len(inputs["class_names"])) if len(chosen) == size else None,
        options={key: value for key, value in asdict(config.network).items() if key in OPTIONS},
        **inputs,
    )


def fusion_of(config: Config, method: Method, plan: Plan, num_classes: int) -> dict[str, Any] | None:
    """Describe the fused classifier, so that it can be built; None if the method has none."""
    for name, term in zip(config.method.terms, method.terms, strict=False):  # the user's own terms come last
        if term.fused_head() is not None:
            every = sizes(config, method, plan, num_classes)
            return {"term": name, "sizes": [asdict(size) for size in every]}
    return None


def inputs_and_classes(config: Config, found: Checkpoint) -> dict[str, Any]:
    """Return class_names, mean and std from the checkpoint; an old checkpoint without them needs its images."""
    if "source" in found.about:
        return dict(found.about["source"])
    source = sources.load(sources.of_run(config.data), labels_only=True)
    if source.data_digest != found.about["data"]:
        raise ValueError(
            f"{found.path} does not say how its images were normalized, and {source.name} has changed: train again"
        )
    return described(source)


def calibrated(
    run: Run, config: Config, found: Checkpoint, about: About, asked: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[About, dict[str, Tensor]]:
    """Add the calibration of this checkpoint, not of another one. Return also the bank that the OOD score may need.

    The test set is not used unless the run chose calibration.source=test.
    """
    measured = run.results_of(found)
    chosen = calibration.of_results(*measured, about.members, about.average, asked) if measured else None
    if chosen is None:
        tell(
            f"{why_not_calibrated(run, found, measured is not None)}: confidences are not calibrated (T = 1), nothing "
            f"abstains; `dicedist evaluate run={run}` may calibrate them"
        )
    elif chosen.source == "test":
        tell(f"{run} was calibrated on its test images (calibration.source=test)")
    wanted = chosen.ood_score if chosen else asked.get("ood_score") or config.calibration.ood_score
    bank_RMD = saved_bank(*measured, about.members) if measured and wanted == KNN else None
    if wanted == KNN and bank_RMD is None:
        wanted, chosen = None, replace(chosen, ood_score=None, ood_threshold=None) if chosen else None
    about = replace(about, ood_score=wanted)
    if chosen is not None:
        about = replace(about, temperature=chosen.temperature, calibration=asdict(chosen))
    return about, {} if bank_RMD is None else {"bank_RMD": bank_RMD}


def saved_bank(results: Results, result: Mapping[str, Any], members: Sequence[int]) -> Tensor | None:
    """Return the training features [R, M, D] of these members; None in results of an earlier version."""
    try:
        places = [result["member_ids"].index(number) for number in members]
        return results.tensors(results.logits_file, result)[calibration.BANK][:, places]
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def why_not_calibrated(run: Run, found: Checkpoint, measured: bool) -> str:
    other = run.result()
    if measured or other is None:
        return f"{run} holds no calibration of these members (no validation images, or evaluated by an earlier version)"
    if other.get("step", found.step) == found.step:
        return f"{run} was evaluated with other weights than those of {found.path.name}"
    return f"{run} was evaluated after step {other['step']}, and these weights are of step {found.step}"


def member_weights(
    about: About, config: Config, found: Checkpoint, held: Sequence[int], pieces: Sequence[str]
) -> dict[str, Tensor]:
    """Return the weights of the members at some places, by their names in an ensemble. pieces: the parts to read."""
    tensors, beginnings = {}, tuple(f"{piece}." for piece in pieces)
    for nth, place in enumerate(held):
        for name, value in part_weights(config, found, config.predictor_part(about.members[place])).items():
            piece, _, rest = name.partition(".")
            if name.startswith(beginnings):
                tensors[f"{piece}s.{nth}.{rest}"] = value
    if about.trunk is not None and held:
        tensors |= {f"trunk.{name}": value for name, value in part_weights(config, found, "trunk").items()}
    return tensors


def head_weights(about: About, config: Config, method: Method, found: Checkpoint) -> dict[str, Tensor]:
    """Return the averaged weights of w, and those of the fused classifier, by their names in an ensemble."""
    tensors: dict[str, Tensor] = {}
    if about.compared:
        of_w = weights_of_w(checkpoint.tensors_of(found, "discriminator"))
        of_w["slots_MDH"] = of_w["slots_MDH"][[about.members[place] for place in about.compared]]
        tensors |= {f"w.{name}": value for name, value in of_w.items()}
    head = method.fused_head
    if about.fusion is not None and head is not None:
        of_part = part_weights(config, found, head.part)
        tensors |= {f"fusion.{name}": value for name, value in checkpoint.of_kind(f"{head.name}.", of_part).items()}
    return tensors


def part_weights(config: Config, found: Checkpoint, part: str) -> dict[str, Tensor]:
    """Return the weights to evaluate and export: the moving average if there is one, otherwise the last step."""
    tensors = checkpoint.tensors_of(found, part)
    averaged = checkpoint.of_kind(AVERAGED_WEIGHTS, tensors) if config.uses_average else {}
    return averaged or checkpoint.of_kind(WEIGHTS, tensors)  # a frozen part has no average


def chosen_members(wanted: list[int] | None, size: int) -> list[int]:
    if wanted is None:
        return list(range(size))
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(size)):
        raise ValueError(f"members={wanted}: the run has members 0 to {size - 1}, name some of them once each")
    return sorted(wanted)


def members_or_student(wanted: Any, method: Method, size: int) -> list[int]:
    """Return the members. wanted: None for all, a list of numbers, or "student"."""
    if wanted == "student":
        student = method.student(size)
        if student is None:
            raise ValueError(f"members=student: method={method.name} trains none, the run has members 0 to {size - 1}")
        return [student]
    if wanted is not None and not (isinstance(wanted, list) and all(type(number) is int for number in wanted)):
        raise ValueError(f"members={wanted}: write numbers like [0,2], or student")
    return chosen_members(wanted, size)
