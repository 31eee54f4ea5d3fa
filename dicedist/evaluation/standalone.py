"""Calibrate and evaluate an ensemble without a training run, on data from Python code."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicedist.config import compose_config
from dicedist.config.plan import Plan
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
    source = source_of(ensemble, test=val)
    aims = calibration.aimed(default_targets(ensemble), targets)
    findings = Evaluator(ensemble, source, stage=Progress).evaluate(
        1, OodConfig({}, {}), replace(aims, source="test"), None
    )
    assert findings is not None
    found = findings.result["calibration"]
    return replace(Calibration(**{entry.name: found[entry.name] for entry in fields(Calibration)}), source="validation")


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
    if taken := [name for name in ood_scores if name in OOD_SCORES]:
        raise ValueError(f"ood_scores {taken[0]!r}: the tables have a score of this name, choose another")
    source = source_of(ensemble, test, val, train)
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


def source_of(ensemble: Ensemble, test: Any, val: Any = None, train: Any = None) -> Source:
    about = ensemble.about
    splits = {name: split_of(ensemble, given, name) for name, given in (("train", train), ("val", val), ("test", test))}
    is_vectors = about.images == VECTORS
    return Source(
        "own", about.class_names, tuple(about.mean), tuple(about.std), about.size,
        train=splits["train"], val=splits["val"], test=splits["test"], data_digest="",
        kind=KIND_OF_VECTORS if is_vectors else IMAGES,
    )  # fmt: skip


def split_of(ensemble: Ensemble, given: Any, name: str) -> Split:
    if given is None:
        return NOTHING
    items = Items(as_dataset(given, name), name, ensemble.about.size, len(ensemble.about.mean))
    labels_N, num_classes = torch.from_numpy(labels_of(items)), len(ensemble.about.class_names)
    if not len(labels_N):
        raise ValueError(f"{name} has no items")
    if not 0 <= labels_N.min() <= labels_N.max() < num_classes:
        raise ValueError(f"{name} has classes from {labels_N.min()} to {labels_N.max()}, the ensemble {num_classes}")
    return Split(items, labels_N)


def pixels(ensemble: Ensemble, given: Any, name: str) -> Tensor:
    """Read the inputs of an OOD set, whose classes do not matter."""
    array = given if hasattr(given, "__array__") else None
    dataset = as_dataset(given if array is None else (array, [0] * len(array)), name)
    items = Items(dataset, name, ensemble.about.size, len(ensemble.about.mean))
    return items.index_select(0, torch.arange(len(dataset)))


def default_targets(ensemble: Ensemble) -> CalibrationConfig:
    """Return the default targets of a training, with the ensemble's OOD score."""
    return replace(compose_config(["data=shapes"]).calibration, ood_score=ensemble.score_name)


def new_run(ensemble: Ensemble, folder: Path) -> Run:
    """Describe the ensemble as a run that was never trained here, so that reports can read its results."""
    about, run = ensemble.about, Run(folder)
    if run.exists():
        raise ValueError(f"{folder} holds a run already: name another folder")
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
