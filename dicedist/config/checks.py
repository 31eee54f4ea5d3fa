"""Checks of a configuration beyond its types. Every refusal is one line with what to write instead."""

import json
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from dicedist.config.schema import (
    AUGMENTATIONS,
    AUGMENTS,
    NOISES,
    RGB,
    TRACKERS,
    Config,
    DataConfig,
    NetworkConfig,
    OptimizerConfig,
    RedundancyConfig,
    ResumingConfig,
    SchedulesConfig,
    keys_of,
)

CHANGEABLE = ("optimizer.", "redundancy.", "bottleneck.", "schedules.")  # keys that change no shape and no image
OWN_IMAGES = {  # data set of the user's own images -> what to write for data.root
    "folder": "FOLDER that holds <class>/*.jpg, or train/<class>/*.jpg and test/<class>/*.jpg",
    "files": "FOLDER that holds <class>/*.jpg, or train/<class>/*.jpg and test/<class>/*.jpg, or a list .csv of path, "
    "label and split",
    "arrays": "FILE.npz that holds images and labels, or a FOLDER with train.npz and test.npz",
    "own": "",
    "shards": "FOLDER, s3://... or http://... that holds train-*.tar and test-*.tar",
}
IMAGE_FILES = ("folder", "files", "shards")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def is_share(value: float) -> bool:
    return 0 <= value < 1


def are_knots(value: Any) -> bool:
    """Return whether the value is [[epoch, value], ...] with epochs rising from 0."""
    try:
        epochs = [float(epoch) for epoch, height in value if math.isfinite(height)]
    except (TypeError, ValueError):
        return False
    return len(epochs) == len(value) > 0 and epochs[0] == 0 and epochs == sorted(set(epochs))


def are_augmentations(value: Any) -> bool:
    return set(value) <= set(AUGMENTATIONS) if isinstance(value, list) else value in AUGMENTS


def are_trackers(value: Any) -> bool:
    """Return whether the value is auto, none, a tracker, or a list of different trackers."""
    if isinstance(value, list):
        names = set(map(str, value))
        return names <= set(TRACKERS) and len(names) == len(value)
    return value in ("auto", "none", *TRACKERS)


KNOTS = "[[epoch, value], ...] with epochs rising from 0"
ONE_OR_MORE = f"one of {', '.join(AUGMENTS)}, or a list of some of {', '.join(AUGMENTATIONS)}"
# Key -> a test of its value, and what to write instead. null passes: the schema states which keys allow it.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ensemble.size": (
        lambda v: v == "auto" or isinstance(v, int) and 1 <= v <= 1000, "auto or a whole number from 1 to 1000"
    ),
    "redundancy.delta": (lambda v: v == "auto" or is_number(v), "auto or a number"),
    "redundancy.scale": (
        lambda v: v in NOISES or is_number(v) and v > 0, f"one of {', '.join(NOISES)}, or a number above 0"
    ),
    "redundancy.floor": (lambda v: 0 <= v < math.inf, "0, or a number above it"),
    "redundancy.max_pairs": (lambda v: v == "auto" or is_number(v) and v >= 1, "auto, null or a number above 0"),
    "redundancy.ranks": (
        lambda v: v in ("auto", "all", "members") or is_number(v) and v >= 1, "auto, all, members, or a number above 0"
    ),
    "optimizer.momentum": (is_share, "a number from 0 to 1"),
    "optimizer.weight_decay": (is_share, "a number from 0 to 1"),
    "optimizer.betas": (lambda v: len(v) == 2 and all(map(is_share, v)), "two numbers from 0 to 1, as in [0.9, 0.999]"),
    "optimizer.layer_decay": (lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "optimizer.ema": (lambda v: 0 < v < 1, "a decay between 0 and 1, as 0.999, or null"),
    "loss.label_smoothing": (is_share, "a number from 0 to 1"),
    "loss.mixup": (lambda v: 0 <= v < math.inf, "a number from 0, as 0.2 or 1"),
    "loss.cutmix": (lambda v: 0 <= v < math.inf, "a number from 0, as 0.2 or 1"),
    "loss.class_weights": (
        lambda v: v == "balanced" or isinstance(v, list) and all(is_number(each) and each > 0 for each in v),
        "balanced, null, or a number above 0 for each class",
    ),
    "bottleneck.log_beta": (lambda v: v == "auto" or are_knots(v), f"auto, or {KNOTS}"),
    "schedules.covariance": (lambda v: len(v) == 2 and 0 <= v[0] < v[1], "[start, end] epochs"),
    "calibration.alpha": (lambda v: 0 < v < 1, "a number above 0 and below 1"),
    "calibration.risk": (is_share, "a number from 0 and below 1"),
    "calibration.coverage": (lambda v: 0 < v <= 1, "a number above 0 and to 1"),
    "calibration.guarantee": (
        lambda v: v == "mean" or is_number(v) and 0 < v < 1, "a probability above 0 and below 1, or mean"
    ),
    "data.val_fraction": (
        lambda v: v == "auto" or is_number(v) and 0 < v < 1, "a number between 0 and 1, auto, or data.split=full"
    ),
    "data.val_limit": (lambda v: v == "auto" or isinstance(v, int) and v >= 1, "auto, null or a whole number from 1"),
    "data.test_fraction": (lambda v: 0 < v < 1, "a number between 0 and 1"),
    "data.noise": (lambda v: 0 <= v < math.inf, "a number from 0"),
    "data.augment": (are_augmentations, ONE_OR_MORE),
    "data.crop_area": (lambda v: len(v) == 2 and 0 < v[0] <= v[1] <= 1, "[least, most] shares above 0 and up to 1"),
    "tracking.to": (
        are_trackers, f"one of auto, none, {', '.join(TRACKERS)}, or a list of trackers, as [mlflow, tensorboard]"
    ),
    "network.dropout": (is_share, "a number from 0 and below 1"),
}  # fmt: skip


def check_rules(config: Any, prefix: str = "") -> None:
    """Check the keys of RULES in a configuration, or in one group of it.

    prefix: "calibration." for that group.
    """
    for key, (is_right, words) in RULES.items():
        if not key.startswith(prefix):
            continue
        value = attrgetter(key.removeprefix(prefix))(config)
        try:
            fits = value is None or is_right(value)
        except TypeError:  # from Python, a value may have any type
            fits = False
        if not fits:
            raise ValueError(f"{key}={value}: write {words}")


def check_limits(config: Any) -> None:
    """Check the choices and bounds that the schema gives, for any of its dataclasses."""
    for name, entry in keys_of(config.__class__).items():
        value, limits = attrgetter(name)(config), entry.metadata
        choices, above, at_least, at_most = (limits[name] for name in ("choices", "above", "at_least", "at_most"))
        if choices is not None and value not in choices:
            words = (word if isinstance(word, str) else json.dumps(word) for word in choices)
            raise ValueError(f"{name}={value}: write one of {', '.join(words)}")
        if above is not None and value is not None and not (value > above and math.isfinite(value)):
            raise ValueError(f"{name}={value}: write a number above {above}")
        if at_least is not None and value is not None and value < at_least:
            raise ValueError(f"{name}={value}: write a whole number from {at_least}")
        if at_most is not None and value is not None and value > at_most:
            raise ValueError(f"{name}={value}: write at most {at_most}")


def check(config: Config) -> None:
    """Check the whole configuration of a training."""
    check_limits(config)
    check_rules(config)
    check_noise(config.redundancy)
    check_graph(config.redundancy)
    if config.structure not in config.method.structures:
        raise ValueError(
            f"method={config.method.name} has no structure={config.structure}: "
            f"write structure={config.method.structures[0]}"
        )
    if "/" in config.run.name or config.run.name.strip() in ("", ".", "..") or not config.run.name.isprintable():
        raise ValueError(f"run.name={config.run.name!r}: write a name for a folder under run.dir={config.run.dir}")
    check_addresses(config)
    check_resuming(config.resuming)
    check_optimizer(config.optimizer, config.schedules)
    check_training(config)
    for name, knots in config.schedules.learning_rate.items():
        if not are_knots(knots):
            raise ValueError(f"schedules.learning_rate.{name}={knots}: write {KNOTS}")
    if config.calibration.risk is None and config.calibration.coverage is None:
        raise ValueError("calibration.risk=null: write calibration.risk=0.05, or calibration.coverage=0.8")
    check_data(config.data)
    check_network(config.network)
    check_frozen_trunk(config)


def check_addresses(config: Config) -> None:
    """Refuse a malformed run.remote, and passwords, which would be written to config.yaml."""
    remote = config.run.remote
    if remote is not None and ("://" not in remote or "::" in remote or remote.startswith("http")):
        raise ValueError(f"run.remote={remote}: write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER")
    variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    for name, address, instead in (
        ("tracking.uri", config.tracking.uri, variables),
        ("run.remote", remote, "the usual variables"),
        ("data.root", config.data.root, "the usual variables"),
    ):
        if "@" in urlsplit(address or "").netloc or name == "run.remote" and "?" in (address or ""):
            raise ValueError(f"{name} holds a password, which would be written to config.yaml: set {instead}")


def check_noise(redundancy: RedundancyConfig) -> None:
    check_rules(redundancy, "redundancy.")
    if redundancy.floor and not redundancy.reads_scale:
        raise ValueError(
            f"redundancy.floor={redundancy.floor} lies under the predicted scale, and redundancy.scale="
            f"{redundancy.scale} asks for another: leave one of them out"
        )


def check_graph(redundancy: RedundancyConfig) -> None:
    if redundancy.graph and redundancy.ranks not in (1, "auto"):
        raise ValueError("redundancy.graph=true records w of one rank: write redundancy.ranks=1, or leave graph out")


def check_resuming(resuming: ResumingConfig) -> None:
    for name in resuming.allow:
        if name not in keys_of(Config) or not name.startswith(CHANGEABLE):
            raise ValueError(f"resume.allow={resuming.allow}: name keys that begin with {', '.join(CHANGEABLE)}")
        if name == "optimizer.name":
            raise ValueError("resume.allow=[optimizer.name]: another optimizer cannot use the state of this one")


def check_optimizer(optimizer: OptimizerConfig, schedules: SchedulesConfig) -> None:
    if isinstance(optimizer.lr, str):
        if optimizer.lr not in schedules.learning_rate:
            known = ", ".join(schedules.learning_rate)
            raise ValueError(f"optimizer.lr={optimizer.lr}: write a number or one of {known}")
    elif not (optimizer.lr > 0 and math.isfinite(optimizer.lr)):
        raise ValueError(f"optimizer.lr={optimizer.lr}: write paper, chen2020 or a number above 0")


def check_training(config: Config) -> None:
    """Check the keys of the optimizer against the rest of the configuration."""
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
    selects = "checkpoint.best" if config.checkpoint.best else "early_stopping.patience"
    if config.checkpoint.best or config.early_stopping.patience is not None:
        if config.data.split == "full":
            raise ValueError(
                f"{selects} needs validation, and data.split=full holds out none: write data.split=holdout"
            )
        if config.trajectory["kind"] != "none":
            raise ValueError(f"{selects}: trajectory.kind={config.trajectory['kind']} samples to the end, leave it out")
    if config.evaluate.weights == "ema" and optimizer.ema is None:
        raise ValueError("evaluate.weights=ema: there is no average of the weights, add optimizer.ema=0.999")
    if optimizer.accumulate > 1 and config.ensemble.replicas > 1:
        raise ValueError(
            f"optimizer.accumulate={optimizer.accumulate} with ensemble.replicas={config.ensemble.replicas}, which "
            "split the batch already: leave one of them out"
        )
    if optimizer.accumulate > 1 and config.compile == "graphs":
        raise ValueError(f"optimizer.accumulate={optimizer.accumulate} cannot be recorded: write compile=true")


def check_data(data: DataConfig) -> None:
    size = 8 if data.name == "scans" else 32
    if data.name not in OWN_IMAGES and data.size != size:
        raise ValueError(f"data.size={data.size}: images of {data.name} have {size} pixels, write data.size={size}")
    if data.channels != RGB:
        check_channels(data)
    if data.name == "vectors" and not data.root:
        raise ValueError("data=vectors: write data.root=FILE (.npz, .safetensors, .csv, .parquet), or a FOLDER of such")
    if (data._target_ is None) == (data.name == "own"):
        raise ValueError(f"data={data.name}: write data=own data._target_=my.module.Dataset, or neither")
    if data.split == "given" and data.name != "own":
        raise ValueError(f"data.split=given: only data=own has a validation set of its own, {data.name} does not")
    if OWN_IMAGES.get(data.name) and not data.root:
        raise ValueError(f"data={data.name}: write data.root={OWN_IMAGES[data.name]}")


def check_channels(data: DataConfig) -> None:
    """Check a number of channels other than three, which not every source, augmentation and decoder can have."""
    asked = f"data.channels={data.channels}"
    if data.name not in OWN_IMAGES:
        raise ValueError(f"{asked}: images of {data.name} have {RGB} channels, leave data.channels out")
    if data.name in IMAGE_FILES and data.channels != 1:
        raise ValueError(f"{asked}: image files have 1 or {RGB} channels, write data=arrays or data=own for others")
    if colored := [name for name in data.augmentations if name in ("jitter", "trivial")]:
        raise ValueError(f"{asked}: data.augment={colored[0]} changes the colors of RGB images, leave it out")
    if data.pipeline == "dali":
        raise ValueError(f"{asked}: DALI reads {RGB} channels here, write data.pipeline=torch")


def check_network(network: NetworkConfig) -> None:
    sizes = {name: getattr(network, name) for name in ("width", "depth", "norm", "dropout")}
    given, lacking = ([name for name, value in sizes.items() if (value is None) is empty] for empty in (False, True))
    if not network.is_dense and network.width is None and given:
        raise ValueError(
            f"network.{given[0]}={sizes[given[0]]}: only network=mlp and heads have it, and {network.label} has no "
            "head: write network.width too"
        )
    if lacking and (given or network.is_dense):
        raise ValueError(f"network.{lacking[0]} is not set: write network=mlp or recipe=heads, which set it")
    if network.is_dense and network.depth == 1:
        raise ValueError("network.depth=1: write a whole number from 2 for an mlp")
    if network.is_dense and network.enlarge is not None:
        raise ValueError("network.enlarge: an mlp reads images as they are, leave it out")


def check_frozen_trunk(config: Config) -> None:
    if not config.network.freezes_trunk:
        if config.data.views > 1:
            raise ValueError(
                f"data.views={config.data.views}: views are kept for a frozen trunk only, otherwise every step draws "
                "new ones: leave data.views out, or write recipe=heads"
            )
        return
    for given, instead in (
        (config.structure != "branch", "structure=branch"),
        (bool(config.loss.cutmix), "loss.cutmix=0, or loss.mixup, which mixes the trunk's outputs"),
        (config.teacher.run is not None, "network.freeze=none: a teacher is shown the images themselves"),
    ):
        if given:
            raise ValueError(f"network.freeze=trunk: write {instead}")
