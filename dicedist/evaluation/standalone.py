"""Calibrate and evaluate an ensemble without a training run, on data from Python code."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.config.schema import OOD_SCORES as SCORES
from dicedist.config.schema import CalibrationConfig, OodConfig
from dicedist.config.targets import LOCAL
from dicedist.console.progress import Progress
from dicedist.data.given import as_dataset
from dicedist.data.sets.own import Items, labels_of
from dicedist.data.sources import IMAGES, Source, Split
from dicedist.data.sources import VECTORS as KIND_OF_VECTORS
from dicedist.evaluation import calibration
from dicedist.evaluation.about import VECTORS
from dicedist.evaluation.calibration import Calibration
from dicedist.evaluation.detection import OwnScore
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.evaluator import Evaluator
from dicedist.evaluation.tables import show
from dicedist.metrics.measures import OOD_SCORES
from dicedist.metrics.summary import checked
from dicedist.runs.run import Run

NOTHING = Split(None, torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class Evaluation:
    """The measures of an ensemble, as in `evaluation["ensemble"]["accuracy"]`; `print` shows tables."""

    result: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.result[name]

    def __str__(self) -> str:
        return show(self.result)


def calibrate(ensemble: Ensemble, val: Any, targets: Mapping[str, Any]) -> Calibration:
    """Choose temperature, label sets and thresholds on held-out inputs."""
    refuse_unknown(targets)
    aims = calibration.aimed(default_targets(ensemble), targets)
    evaluator = Evaluator(ensemble, source_of(ensemble, split_of(ensemble, val, "val")), stage=Progress)
    read = evaluator.read_everything(OodConfig({}, {}), None, fresh=False)
    assert read is not None
    checked(read.test.logits_MNK, read.test.labels_N)
    return evaluator.calibrate(read.test, aims)


def refuse_unknown(targets: Mapping[str, Any]) -> None:
    known = [entry.name for entry in fields(CalibrationConfig) if entry.name != "source"]
    if unknown := [name for name in targets if name not in known]:
        raise ValueError(f"calibrate has no target {unknown[0]}: write {', '.join(known)}")
    if "ood_score" in targets and targets["ood_score"] not in SCORES:
        raise ValueError(f"ood_score={targets['ood_score']}: write one of {', '.join(SCORES)}")


def evaluate(
    ensemble: Ensemble,
    test: Any,
    val: Any,
    train: Any,
    ood: Mapping[str, Any],
    ood_scores: Mapping[str, OwnScore],
    folds: int,
    output: str | Path | None,
) -> Evaluation:
    """Measure an ensemble as at the end of a training. output: the folder of a run, for reports and comparisons."""
    refuse_unnamed("ood", ood, "inputs")
    refuse_unnamed("ood_scores", ood_scores, "a function of logits and features")
    if taken := [name for name in ood_scores if name in OOD_SCORES]:
        raise ValueError(f"ood_scores {taken[0]!r}: the tables have a score of this name, choose another")
    if output is not None:
        refuse_taken(Path(output))
    splits = {"test": test, **{name: given for name, given in (("val", val), ("train", train)) if given is not None}}
    source = source_of(ensemble, **{name: split_of(ensemble, given, name) for name, given in splits.items()})
    sets: dict[str, Any] = {
        name: given if given is None or isinstance(given, str | Path) else pixels(ensemble, given, name)
        for name, given in ood.items()
    }
    chosen = None if ensemble.about.calibration is None else Calibration(**ensemble.about.calibration)
    evaluator = Evaluator(ensemble, source, stage=Progress, chosen=chosen, ood_scores=ood_scores)
    findings = evaluator.evaluate(folds, OodConfig(sets, {}), default_targets(ensemble), None)
    assert findings is not None
    if output is not None:
        findings.save(new_run(ensemble, Path(output)))
    return Evaluation(findings.result)


def refuse_unnamed(name: str, given: Any, values: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{name} is a {type(given).__name__}: give a dict of names (text) -> {values}")
    if name == "ood_scores" and (wrong := [key for key, value in given.items() if not callable(value)]):
        raise ValueError(f"ood_scores {wrong[0]!r} is a {type(given[wrong[0]]).__name__}: give {values}")


def source_of(ensemble: Ensemble, test: Split, val: Split = NOTHING, train: Split = NOTHING) -> Source:
    about = ensemble.about
    return Source(
        "own", about.class_names, tuple(about.mean), tuple(about.std), about.size,
        train=train, val=val, test=test, data_digest="", kind=KIND_OF_VECTORS if about.images == VECTORS else IMAGES,
    )  # fmt: skip


def split_of(ensemble: Ensemble, given: Any, name: str) -> Split:
    items, num_classes = items_of(ensemble, as_dataset(given, name), name), len(ensemble.about.class_names)
    labels_N = torch.from_numpy(labels_of(items))
    if labels_N.max() >= num_classes:
        raise ValueError(f"{name} has classes from {labels_N.min()} to {labels_N.max()}, the ensemble {num_classes}")
    refuse_other_shape(ensemble, items)
    return Split(items, labels_N)


def items_of(ensemble: Ensemble, dataset: Any, name: str) -> Items:
    if not len(dataset):
        raise ValueError(f"{name} has no items")
    return Items(dataset, name, ensemble.about.size, len(ensemble.about.mean))


def refuse_other_shape(ensemble: Ensemble, items: Items) -> None:
    """Raise a ValueError if the first input does not have the shape that the ensemble reads."""
    C, size = len(ensemble.about.mean), ensemble.about.size
    reads_vectors, shape = ensemble.about.images == VECTORS, items.item(0)[0].shape
    if shape != ((C,) if reads_vectors else (size, size, C)):
        wanted = f"vectors of {C} values" if reads_vectors else f"images of {C} channels"
        raise ValueError(f"{items.name}[0] has shape {list(shape)}, and the ensemble reads {wanted}")


class Unlabeled:
    """The inputs of a dataset of (input, ...), of inputs alone, or of a list; with a class that does not matter."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        found = self.dataset[row]
        return (found[0] if isinstance(found, tuple | list) and len(found) else found), 0


def pixels(ensemble: Ensemble, given: Any, name: str) -> Tensor:
    """Read the inputs of an OOD set, whose classes do not matter."""
    dataset = given if hasattr(given, "__array__") else as_dataset(given, name)
    items = items_of(ensemble, Unlabeled(dataset), name)
    refuse_other_shape(ensemble, items)
    return items.index_select(0, torch.arange(len(dataset)))


def default_targets(ensemble: Ensemble) -> CalibrationConfig:
    """Return the default targets of a training, with the ensemble's OOD score."""
    return replace(compose_config(["data=shapes"]).calibration, ood_score=ensemble.score_name)


def refuse_taken(folder: Path) -> None:
    if Run(folder).exists():
        raise ValueError(f"{folder} holds a run already: name another folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")


def new_run(ensemble: Ensemble, folder: Path) -> Run:
    """Describe the ensemble as a run that was never trained here, so that reports can read its results."""
    about, run = ensemble.about, Run(folder)
    channels = [] if about.images == VECTORS else [f"data.channels={len(about.mean)}"]
    words = [
        "data=own", f"data._target_={LOCAL}data", f"data.size={about.size}", *channels, "method=ind", "tracking=none",
        f"network._target_={LOCAL}{about.networks[0]}", f"network.name={about.networks[0]}",
        f"ensemble.size={len(about.members)}", f"evaluate.average={about.average}",
        f"run.name={folder.name}", f"run.dir={folder.parent}", "max_steps=1",
    ]  # fmt: skip
    config = compose_config(words)
    folder.mkdir(parents=True, exist_ok=True)
    run.save_plan(Plan.of(config, len(about.members), about.input_shape))
    run.save_config(config)
    return run
