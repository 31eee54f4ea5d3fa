"""The ensemble of a run's last checkpoint; the images that it was trained on are not needed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dicedist.algorithm.build import sizes
from dicedist.algorithm.objectives import Method
from dicedist.config.plan import Plan
from dicedist.config.schema import AVERAGES, Config
from dicedist.console.lines import warn
from dicedist.data import sources
from dicedist.evaluation import calibration
from dicedist.evaluation.about import VECTORS, About
from dicedist.evaluation.ensemble import IMAGES, Ensemble, build, filled
from dicedist.evaluation.fusing import fusion_weights
from dicedist.evaluation.members import members_or_student
from dicedist.evaluation.redundancy import weights_of_w
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import AVERAGED_WEIGHTS, WEIGHTS, Checkpoint
from dicedist.runs.run import Run

NAMED_OTHERWISE = ("name", "_target_", "trusted", "per_member")  # by About's own fields
OF_TRAINING = ("pretrained", "sha256", "freeze")


def load_ensemble(
    run: Run | str | Path,
    members: Any = None,
    average: str | None = None,
    images: str = "uint8",
    trusted: bool = False,
    tell: Callable[[str], None] = warn,
    asked: Mapping[str, Any] | None = None,
) -> Ensemble:
    """members: None for all, numbers, or "student". average: None for the run's own. tell: receives warnings.

    asked: targets of the calibration other than the run's.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    found, config, plan = run.checkpoint(), run.config(), run.plan()
    size, method = plan.num_predictors, Method(config.method)
    chosen = members_or_student(members, method, size)
    average = average or config.evaluate.average
    for name, value, known in (("images", images, IMAGES), ("average", average, AVERAGES)):
        if value not in known:
            raise ValueError(f"{name}={value}: write {' or '.join(known)}")
    of_members = config.network.per_member or [config.network.name] * plan.num_members
    names = [name for name in of_members for _ in range(config.samples)]
    known_to_w = method.compared(size) if method.estimator else ()
    compared = [place for place, number in enumerate(chosen) if number in known_to_w]
    about = About(
        run=run.name,
        step=found.step,
        members=chosen,
        networks=[names[number] for number in chosen],
        target=None if config.network.per_member else config.network._target_,
        trunk=names[0] if config.structure == "branch" else None,
        compared=compared if len(compared) > 1 else [],
        conditional=bool(method.estimator and method.estimator.conditional),
        size=config.data.size,
        images=VECTORS if plan.reads_vectors else images,
        average=average,
        **calibrated(run, chosen, average, asked or {}, tell),
        fusion=fusion_of(config, method, plan, chosen, found),
        options={k: v for k, v in asdict(config.network).items() if k not in (*NAMED_OTHERWISE, *OF_TRAINING)},
        **inputs_and_classes(config, found),
    )
    if about.fusion is not None:
        tell(
            f"{run} has a fused classifier: fused_label and fused_probabilities are its answers; label, confidence and "
            "all that is calibrated are of the members' mean"
        )
    ensemble = build(about, trusted)
    kind = AVERAGED_WEIGHTS if config.uses_average else WEIGHTS
    return filled(ensemble, weights(ensemble, config, found, kind), found.path)


def fusion_of(
    config: Config, method: Method, plan: Plan, chosen: list[int], found: Checkpoint
) -> dict[str, Any] | None:
    """How to build the fused classifier; None if the method has none, or not all members are chosen."""
    term = method.fusing
    if term is None or len(chosen) < plan.num_predictors:
        return None
    of_members = sizes(config, method, plan, len(inputs_and_classes(config, found)["class_names"]))
    name = next(name for name, built in zip(config.method.terms, method.terms, strict=True) if built is term)
    return {"term": name, "sizes": [asdict(size) for size in of_members]}


def inputs_and_classes(config: Config, found: Checkpoint) -> dict[str, Any]:
    """class_names, mean and std, from the checkpoint; an old checkpoint without them needs its images again."""
    if "source" in found.about:
        return dict(found.about["source"])
    source = sources.load(replace(config.data, download=False), labels_only=True)
    if source.data_digest != found.about["data"]:
        raise ValueError(
            f"{found.path} does not say how its images were normalised, and {source.name} has changed since"
        )
    return {name: list(getattr(source, name)) for name in ("class_names", "mean", "std")}


def calibrated(
    run: Run, members: list[int], average: str, asked: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """What About keeps of the run's calibration; nothing comes from the test set unless the run says so."""
    found = calibration.of_run(run, members, average, asked)
    if found is None:
        tell(
            f"{run} holds no calibration of these members (no validation images, or evaluated by an earlier version): "
            f"confidences are not calibrated (T = 1), nothing abstains; `dicedist evaluate run={run}` may bring it"
        )
    elif found.source == "test":
        tell(f"{run} was calibrated on its test images (calibration.source=test)")
    return {"temperature": found.temperature if found else 1.0, "calibration": asdict(found) if found else None}


def weights(ensemble: Ensemble, config: Config, found: Checkpoint, kind: str = WEIGHTS) -> dict[str, Tensor]:
    """The checkpoint's weights, by their names in the ensemble. kind: of the members; w is averaged."""
    about = ensemble.about
    tensors: dict[str, Tensor] = {}
    for place, number in enumerate(about.members):
        for name, value in part_weights(found, config.predictor_part(number), kind).items():
            piece, _, rest = name.partition(".")
            if piece in ("encoder", "classifier"):
                tensors[f"{piece}s.{place}.{rest}"] = value
    if about.trunk is not None:
        tensors |= {f"trunk.{name}": value for name, value in part_weights(found, "trunk", kind).items()}
    if about.fusion is not None:
        of_fusion = fusion_weights(config, Method(config.method), found)
        tensors |= {f"fusion.{name}": value for name, value in of_fusion.items()}
    if about.compared:
        of_w = weights_of_w(checkpoint.tensors_of(found, "discriminator"))
        slots = [about.members[place] for place in about.compared]
        of_w["slots_MDH"] = of_w["slots_MDH"][slots, : ensemble.feature_dim]
        tensors |= {f"w.{name}": value for name, value in of_w.items()}
    return tensors


def part_weights(found: Checkpoint, part: str, kind: str = WEIGHTS) -> dict[str, Tensor]:
    return checkpoint.of_kind(kind, checkpoint.tensors_of(found, part))
