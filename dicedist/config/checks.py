"""What types cannot say of a configuration. Every refusal is one line that tells what to write instead."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from dicedist.config.schema import (
    AUGMENTATIONS,
    AUGMENTS,
    NOISES,
    Config,
    DataConfig,
    LossConfig,
    NetworkConfig,
    OptimizerConfig,
    RedundancyConfig,
    ResumingConfig,
    SchedulesConfig,
)

CHANGEABLE = ("optimizer.", "redundancy.", "bottleneck.", "schedules.")  # keys that change no shape and no image
OWN_IMAGES = {  # data sets of the user's own images, of any size -> what data.root names
    "folder": "FOLDER that holds train/<class>/*.jpg and test/<class>/*.jpg",
    "files": "FOLDER that holds train/<class>/*.jpg and test/<class>/*.jpg, or a list .csv of path, label and split",
    "own": "",
    "shards": "FOLDER, s3://... or http://... that holds train-*.tar and test-*.tar",
}
Knots = Sequence[Sequence[float]]  # [[epoch, value], ...], epochs rising from 0


def keys_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Every key in full, its value, and what the schema says of it."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            yield from keys_of(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, value, entry.metadata


def check_limits(config: Any) -> None:
    """Choices and bounds that stand in the schema, of any of its dataclasses."""
    for name, value, limits in keys_of(config):
        choices, above, at_least = limits.get("choices"), limits.get("above"), limits.get("at_least")
        if choices is not None and value not in choices:
            words = (word if isinstance(word, str) else json.dumps(word) for word in choices)
            raise ValueError(f"{name}={value}: write one of {', '.join(words)}")
        if above is not None and value is not None and not (value > above and math.isfinite(value)):
            raise ValueError(f"{name}={value}: write a number above {above}")
        if at_least is not None and value is not None and value < at_least:
            raise ValueError(f"{name}={value}: write a whole number from {at_least}")


def check(config: Config) -> None:
    """The whole configuration of a training."""
    check_limits(config)
    size, delta = config.ensemble.size, config.redundancy.delta
    if not (size == "auto" or isinstance(size, int) and 1 <= size <= 1000):
        raise ValueError(f"ensemble.size={size}: write auto or a whole number from 1 to 1000")
    if not (delta == "auto" or isinstance(delta, int | float) and math.isfinite(delta)):
        raise ValueError(f"redundancy.delta={delta}: write auto or a number")
    check_noise(config.redundancy)
    pairs = config.redundancy.max_pairs
    if pairs not in (None, "auto") and (isinstance(pairs, str) or pairs < 1):
        raise ValueError(f"redundancy.max_pairs={pairs}: write auto, null or a number above 0")
    ranks = config.redundancy.ranks
    if ranks != "members" and (isinstance(ranks, str) or ranks < 1):
        raise ValueError(f"redundancy.ranks={ranks}: write members, or a number above 0")
    if config.structure not in config.method.structures:
        raise ValueError(
            f"method={config.method.name} has no structure={config.structure}: "
            f"write structure={config.method.structures[0]}"
        )
    if "/" in config.run.name or config.run.name.strip() in ("", ".", "..") or not config.run.name.isprintable():
        raise ValueError(f"run.name={config.run.name!r}: write a name for a folder under run.dir={config.run.dir}")
    if "@" in urlsplit(config.tracking.uri or "").netloc:
        raise ValueError(
            "tracking.uri holds a password, which would be written to config.yaml: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
    remote = config.run.remote
    if remote is not None and ("://" not in remote or "::" in remote or remote.startswith("http")):
        raise ValueError(f"run.remote={remote}: write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER")
    if "@" in urlsplit(remote or "").netloc or "?" in (remote or ""):
        raise ValueError("run.remote holds a password, which would be written to config.yaml: set the usual variables")
    check_resuming(config.resuming, {name for name, _, _ in keys_of(config)})
    check_optimizer(config.optimizer, config.schedules)
    check_training(config)
    check_loss(config.loss)
    check_schedules(config.schedules)
    check_knots("bottleneck.log_beta", config.bottleneck.log_beta)
    check_data(config.data)
    check_network(config.network)
    check_calibration(config.calibration)


def check_noise(redundancy: RedundancyConfig) -> None:
    scale, floor = redundancy.scale, redundancy.floor
    if isinstance(scale, str) and scale not in NOISES or isinstance(scale, int | float) and not 0 < scale < math.inf:
        raise ValueError(f"redundancy.scale={scale}: write one of {', '.join(NOISES)}, or a number above 0")
    if not 0 <= floor < math.inf:
        raise ValueError(f"redundancy.floor={floor}: write 0, or a number above it")
    if floor and not redundancy.reads_scale:
        raise ValueError(
            f"redundancy.floor={floor} lies under the predicted scale, and redundancy.scale={scale} asks for another: "
            "leave one of them out"
        )


def check_resuming(resuming: ResumingConfig, known: Collection[str]) -> None:
    for name in resuming.allow:
        if name not in known or not name.startswith(CHANGEABLE):
            raise ValueError(f"resume.allow={resuming.allow}: name keys that begin with {', '.join(CHANGEABLE)}")
        if name == "optimizer.name":
            raise ValueError("resume.allow=[optimizer.name]: another optimiser cannot go on with the state of this one")


def check_optimizer(optimizer: OptimizerConfig, schedules: SchedulesConfig) -> None:
    if isinstance(optimizer.lr, str):
        if optimizer.lr not in schedules.learning_rate:
            known = ", ".join(schedules.learning_rate)
            raise ValueError(f"optimizer.lr={optimizer.lr}: write a number or one of {known}")
    elif not (optimizer.lr > 0 and math.isfinite(optimizer.lr)):
        raise ValueError(f"optimizer.lr={optimizer.lr}: write paper, chen2020 or a number above 0")
    for name, share in (("momentum", optimizer.momentum), ("weight_decay", optimizer.weight_decay)):
        if not 0 <= share < 1:
            raise ValueError(f"optimizer.{name}={share}: write a number from 0 to 1")
    if not (len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas)):
        raise ValueError(f"optimizer.betas={optimizer.betas}: write two numbers from 0 to 1, as in [0.9, 0.999]")
    if not 0 < optimizer.layer_decay <= 1:
        raise ValueError(f"optimizer.layer_decay={optimizer.layer_decay}: write a number above 0, at most 1")
    if optimizer.ema is not None and not 0 < optimizer.ema < 1:
        raise ValueError(f"optimizer.ema={optimizer.ema}: write a decay between 0 and 1, as 0.999, or null")


def check_training(config: Config) -> None:
    """What the optimiser asks of the rest of the run."""
    optimizer = config.optimizer
    if optimizer.name != "sgd" and isinstance(optimizer.lr, str):
        raise ValueError(
            f"optimizer.name={optimizer.name} with optimizer.lr={optimizer.lr}, whose rates are for SGD: "
            "write a number, as optimizer.lr=1e-3"
        )
    if not 0 <= optimizer.warmup_epochs < config.epochs:
        raise ValueError(
            f"optimizer.warmup_epochs={optimizer.warmup_epochs:g} of epochs={config.epochs}: write fewer, from 0"
        )
    if config.evaluate.weights == "ema" and optimizer.ema is None:
        raise ValueError("evaluate.weights=ema: there is no average of the weights, add optimizer.ema=0.999")
    if optimizer.accumulate > 1 and config.ensemble.replicas > 1:
        raise ValueError(
            f"optimizer.accumulate={optimizer.accumulate} with ensemble.replicas={config.ensemble.replicas}, which "
            "split the batch already: leave one of them out"
        )
    if optimizer.accumulate > 1 and config.compile == "graphs":
        raise ValueError(f"optimizer.accumulate={optimizer.accumulate} cannot be recorded: write compile=true")


def check_loss(loss: LossConfig) -> None:
    if not 0 <= loss.label_smoothing < 1:
        raise ValueError(f"loss.label_smoothing={loss.label_smoothing}: write a number from 0 to 1")
    for name, alpha in (("mixup", loss.mixup), ("cutmix", loss.cutmix)):
        if not (alpha >= 0 and math.isfinite(alpha)):
            raise ValueError(f"loss.{name}={alpha}: write a number from 0, as 0.2 or 1")
    given = loss.class_weights
    numbers = isinstance(given, list) and all(isinstance(each, int | float) and each > 0 for each in given)
    if not (given is None or given == "balanced" or numbers):
        raise ValueError(f"loss.class_weights={given}: write balanced, null, or a number above 0 for each class")


def check_schedules(schedules: SchedulesConfig) -> None:
    start, end = schedules.covariance if len(schedules.covariance) == 2 else (1, 0)
    if not 0 <= start < end:
        raise ValueError(f"schedules.covariance={schedules.covariance}: write [start, end] epochs")
    for name, knots in schedules.learning_rate.items():
        check_knots(f"schedules.learning_rate.{name}", knots)


def check_knots(name: str, knots: Knots) -> None:
    try:
        epochs = [float(epoch) for epoch, value in knots if math.isfinite(value)]
    except (TypeError, ValueError):
        epochs = []
    if not epochs or len(epochs) < len(knots) or epochs[0] != 0 or epochs != sorted(set(epochs)):
        raise ValueError(f"{name}={knots}: write [[epoch, value], ...] with epochs rising from 0")


def check_calibration(calibration: Any) -> None:
    """Checks the keys of a training, or of a command, whose keys may be null."""
    for name, lowest, highest in (
        ("alpha", "above 0", "below 1"),
        ("risk", "from 0", "below 1"),
        ("coverage", "above 0", "to 1"),
    ):
        value = getattr(calibration, name)
        if value is None:
            continue
        inside = 0 < value < 1 or (name == "risk" and value == 0) or (name == "coverage" and value == 1)
        if not inside:
            raise ValueError(f"calibration.{name}={value}: write a number {lowest} and {highest}")


def check_data(data: DataConfig) -> None:
    if not (math.isfinite(data.val_fraction) and 0 < data.val_fraction < 1):
        raise ValueError(f"data.val_fraction={data.val_fraction}: write a number between 0 and 1, or data.split=full")
    if data.name not in OWN_IMAGES and data.size != 32:
        raise ValueError(f"data.size={data.size}: the images of {data.name} are 32 pixels wide, write data.size=32")
    if not (math.isfinite(data.test_fraction) and 0 < data.test_fraction < 1):
        raise ValueError(f"data.test_fraction={data.test_fraction}: write a number between 0 and 1")
    if not (math.isfinite(data.noise) and data.noise >= 0):
        raise ValueError(f"data.noise={data.noise}: write a number from 0")
    if data.name == "vectors" and not data.root:
        raise ValueError("data=vectors: write data.root=FILE (.npz, .safetensors, .csv, .parquet), or a FOLDER of such")
    if (data._target_ is None) == (data.name == "own"):
        raise ValueError(f"data={data.name}: write data=own data._target_=my.module.Dataset, or neither")
    if OWN_IMAGES.get(data.name) and not data.root:
        raise ValueError(f"data={data.name}: write data.root={OWN_IMAGES[data.name]}")
    if "@" in urlsplit(data.root or "").netloc:
        raise ValueError("data.root holds a password, which would be written to config.yaml: set the usual variables")
    named = data.augment if isinstance(data.augment, list) else None
    if data.augment not in AUGMENTS if named is None else not set(named) <= set(AUGMENTATIONS):
        one, several = ", ".join(AUGMENTS), ", ".join(AUGMENTATIONS)
        raise ValueError(f"data.augment={data.augment}: write one of {one}, or a list of some of {several}")
    low, high = data.crop_area if len(data.crop_area) == 2 else (1, 0)
    if not 0 < low <= high <= 1:
        raise ValueError(f"data.crop_area={data.crop_area}: write [least, most] shares above 0 and up to 1")


def check_network(network: NetworkConfig) -> None:
    sizes = {name: getattr(network, name) for name in ("width", "depth", "norm", "dropout")}
    if not network.is_dense:
        if given := [name for name, value in sizes.items() if value is not None]:
            raise ValueError(f"network.{given[0]}={sizes[given[0]]}: only network=mlp has it, {network.label} does not")
    elif lacking := [name for name, value in sizes.items() if value is None]:
        raise ValueError(f"network.{lacking[0]} is not set: write network=mlp, which sets it")
    elif not 0 <= sizes["dropout"] < 1:
        raise ValueError(f"network.dropout={network.dropout}: write a number from 0 and below 1")
