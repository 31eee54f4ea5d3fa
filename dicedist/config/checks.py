"""What types cannot say of a configuration. Every refusal is one line that tells what to write instead."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from dicedist.config.schema import Config, DataConfig, OptimizerConfig, ResumingConfig, SchedulesConfig

CHANGEABLE = ("optimizer.", "redundancy.", "bottleneck.", "schedules.")  # keys that change no shape and no image
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
    check_resuming(config.resuming, {name for name, _, _ in keys_of(config)})
    check_optimizer(config.optimizer, config.schedules)
    check_schedules(config.schedules)
    check_knots("bottleneck.log_beta", config.bottleneck.log_beta)
    check_data(config.data)


def check_resuming(resuming: ResumingConfig, known: Collection[str]) -> None:
    for name in resuming.allow:
        if name not in known or not name.startswith(CHANGEABLE):
            raise ValueError(f"resume.allow={resuming.allow}: name keys that begin with {', '.join(CHANGEABLE)}")


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


def check_data(data: DataConfig) -> None:
    if not (math.isfinite(data.val_fraction) and 0 < data.val_fraction < 1):
        raise ValueError(f"data.val_fraction={data.val_fraction}: write a number between 0 and 1, or data.split=full")
    if data.name != "folder" and data.size != 32:
        raise ValueError(f"data.size={data.size}: the images of {data.name} are 32 pixels wide, write data.size=32")
    if data.name == "folder" and not data.root:
        raise ValueError("data=folder: write data.root=FOLDER that holds train/<class>/*.jpg and test/<class>/*.jpg")
