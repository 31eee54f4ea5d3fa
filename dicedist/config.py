"""The configuration of a run: types here and beside the code they configure, values in conf/, all checked first."""

import contextlib
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dicedist import data
from dicedist.data import DataConfig
from dicedist.discriminator import RedundancyConfig
from dicedist.networks import NetworkConfig
from dicedist.objectives import MethodConfig
from dicedist.placement import EnsembleConfig
from dicedist.schedules import Schedules, SchedulesConfig
from dicedist.tracking import TrackingConfig

PACKAGED = Path(__file__).parent / "conf"
CONF = PACKAGED if PACKAGED.exists() else Path(__file__).parent.parent / "conf"
T = TypeVar("T")
STRUCTURES = ("net", "branch")
MAY_CHANGE = (
    "epochs",
    "max_steps",
    "resume",
    "run.dir",
    "log.",
    "checkpoint.",
    "evaluate.",
    "ood.",
    "distributed.",
    "tracking.",
    "data.root",
    "data.download",
    "data.num_threads",
    "network.trusted",
)
PRECISIONS = ("fp32", "bf16", "fp16")
# A network may be called torchvision/resnet18, a folder may not.
OmegaConf.register_new_resolver("plain", lambda name: name.replace("/", "-"), replace=True)


@dataclass
class BottleneckConfig:
    log_beta: list[Any]  # [[epoch, log(beta_ceb)], ...]


@dataclass
class OptimizerConfig:
    lr: float | int | str  # paper, chen2020, or a number: the paper's schedule from there
    momentum: float
    nesterov: bool
    weight_decay: float


@dataclass
class RunConfig:
    name: str
    dir: str


@dataclass
class LogConfig:
    every_steps: int


@dataclass
class EvaluateConfig:
    average: str  # logits | probabilities
    folds: int  # random halves on which temperatures are fitted
    every_epochs: int  # validation during training


@dataclass
class OodConfig:
    sets: dict[str, str | None]  # name -> a folder or .npz; null: looked for by its name in data.root


@dataclass
class CheckpointConfig:
    every_minutes: float | None
    every_steps: int | None
    every_epochs: int | None
    keep: int


@dataclass
class DistributedConfig:
    timeout: float  # seconds that a rank waits for another


@dataclass
class Config:
    epochs: int
    max_steps: int | None
    batch_size: int
    seed: int
    precision: str
    compile: bool | str
    resume: str
    data: DataConfig
    network: NetworkConfig
    structure: str
    method: MethodConfig
    ensemble: EnsembleConfig
    bottleneck: BottleneckConfig
    redundancy: RedundancyConfig
    optimizer: OptimizerConfig
    schedules: SchedulesConfig
    run: RunConfig
    log: LogConfig
    checkpoint: CheckpointConfig
    evaluate: EvaluateConfig
    ood: OodConfig
    distributed: DistributedConfig
    tracking: TrackingConfig

    def schedule(self) -> Schedules:
        return Schedules(self.schedules, self.optimizer.lr, self.bottleneck.log_beta, self.epochs)


def compose_config(overrides: Sequence[str]) -> Config:
    """conf/train.yaml with the user's overrides, typed and checked; ValueError of one line otherwise."""
    config = compose_typed("train", overrides, Config)
    validate(config)
    return config


def compose_typed(name: str, overrides: Sequence[str], schema: type[T]) -> T:
    for override in overrides:
        if override.startswith(("+", "~")) or "=" not in override:
            raise ValueError(f"{override}: write key=value, with a key that `--help` lists")
    try:
        # A user's own OOD sets are new keys, which Hydra adds only when forced.
        values = composed(name, [f"++{o}" if o.startswith("ood.sets") else o for o in overrides])
    except HydraException as error:
        raise ValueError(explain(error, name, overrides)) from error
    return typed(values, schema)


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def load_config(path: Path) -> Config:
    """The config.yaml of a run, perhaps someone else's: nothing in it is evaluated, and its code is not trusted."""
    try:
        loaded = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is missing or damaged") from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{path} is not the config of a run")
    for key, value in flat(OmegaConf.to_container(loaded)).items():
        if "${" in str(value):
            raise ValueError(f"{path}: {key} holds an interpolation, which a run's config never does")
    config = typed(with_newer_keys(loaded), Config)
    config.network.trusted = False
    validate(config)
    return config


def with_newer_keys(loaded: DictConfig) -> DictConfig:
    """A run made before a key existed did what its default does."""
    with mistakes_named():
        missing = OmegaConf.missing_keys(OmegaConf.merge(OmegaConf.structured(Config), loaded))
    if missing:
        defaults = composed("train", [])
        for key in missing:
            OmegaConf.update(loaded, key, OmegaConf.select(defaults, key), force_add=True)
    return loaded


def save_config(config: Config, path: Path) -> None:
    """Under its name only when it is whole."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    draft.rename(path)


def typed(values: DictConfig, schema: type[T]) -> T:
    with mistakes_named():
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(config, schema)
    return config


@contextlib.contextmanager
def mistakes_named() -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def explain(error: HydraException, name: str, overrides: Sequence[str]) -> str:
    """One line of Hydra's many, with the nearest key or option where one was misspelt."""
    text, known = str(error), keys(composed(name, []))
    for override in overrides:
        key, _, value = override.partition("=")
        group = CONF / key
        if group.is_dir():
            options = choices_of(group)
            if value not in options:
                listed = ", ".join(by_folder(options))
                return f"{override}: there is no such {key}{nearest(value, options)}; write one of {listed}"
        elif f"'{key}'" in text:
            return f"{key}: there is no such key{nearest(key, known)}"
    return " ".join(text.split())


def choices_of(group: Path) -> list[str]:
    paths = (path for path in group.rglob("*.yaml") if not path.stem.startswith("_"))
    return sorted(path.relative_to(group).with_suffix("").as_posix() for path in paths)


def by_folder(options: Sequence[str]) -> list[str]:
    """Options of a subfolder, of which there may be hundreds, as one."""
    return list(dict.fromkeys(option.partition("/")[0] + "/..." * ("/" in option) for option in options))


def nearest(word: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def keys(config: DictConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in config:
        names.append(prefix + str(key))
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            names += keys(child, f"{prefix}{key!s}.")
    return names


def differences(saved: Config, wanted: Config) -> list[str]:
    """What makes a run another run: every key that differs but those that may change between two starts."""
    return changes(flattened(saved), flattened(wanted), MAY_CHANGE)


def changes(old: Mapping[str, Any], new: Mapping[str, Any], besides: tuple[str, ...]) -> list[str]:
    """By key, but for those that begin so."""
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(besides)
    ]


def flattened(config: Config) -> dict[str, Any]:
    """Every key in full, with its value."""
    return flat(OmegaConf.to_container(OmegaConf.structured(config)))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {name: leaf for key, value in values.items() for name, leaf in flat(value, f"{prefix}{key}.").items()}


def show_help(usage: str | None, name: str) -> None:
    """What the command does, and every key with its default and what its file remarks on it."""
    known = remarks(name)
    defaults = [
        f"{line:<32} # {known[key]}" if key in known else line
        for key, line in keyed(OmegaConf.to_yaml(composed(name, [])))
    ]
    groups = [group for group in sorted(CONF.iterdir()) if group.is_dir()]
    choices = [f"{group.name}={'|'.join(by_folder(choices_of(group)))}" for group in groups]
    listed = "Choices\n\n    " + "\n    ".join(choices) + "\n\n" if name == "train" else ""
    print(f"{usage}\n{listed}Keys and their values by default (write key=value)\n")
    print("\n".join(defaults))


def remarks(name: str) -> dict[str, str]:
    """Key -> the comment beside it, in the command's file and the files that it takes in."""
    taken_in = ("data/_common", "network/resnet32", "tracking/mlflow") if name == "train" else ()
    found: dict[str, str] = {}
    for stem in (name, *taken_in):
        text = (CONF / f"{stem}.yaml").read_text()
        group = "" if "/" not in stem or "@package _global_" in text else stem.partition("/")[0] + "."
        found |= {group + key: line.partition(" # ")[2] for key, line in keyed(text) if key and " # " in line}
    return found


def keyed(text: str) -> Iterator[tuple[str, str]]:
    """The lines of a YAML mapping, each with the whole key that it sets, or none."""
    above: list[str] = []
    for line in text.splitlines():
        setting = re.match(r"( *)(\w+):", line)
        if setting is not None:
            above[len(setting[1]) // 2 :] = [setting[2]]
        yield ".".join(above) if setting is not None else "", line


def validate(config: Config) -> None:
    """What types cannot say. Every line tells what to write instead."""
    redundancy = config.redundancy
    positive = {
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "redundancy.tau": redundancy.tau,
        "redundancy.num_samples": redundancy.num_samples,
        "redundancy.num_steps": redundancy.num_steps,
        "redundancy.negatives": redundancy.negatives,
        "redundancy.memory": redundancy.memory,
        "redundancy.lr": redundancy.lr,
        "schedules.ramp_up": config.schedules.ramp_up,
        "schedules.reference_epochs": config.schedules.reference_epochs,
        "log.every_steps": config.log.every_steps,
        "distributed.timeout": config.distributed.timeout,
        "ensemble.replicas": config.ensemble.replicas,
        "evaluate.folds": config.evaluate.folds,
        "evaluate.every_epochs": config.evaluate.every_epochs,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.every_minutes": config.checkpoint.every_minutes,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.every_epochs": config.checkpoint.every_epochs,
        "max_steps": config.max_steps,
        "redundancy.max_pairs": redundancy.max_pairs,
    }
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value}: write a number above 0")
    choices = {
        "structure": (config.structure, STRUCTURES),
        "precision": (config.precision, PRECISIONS),
        "compile": (config.compile, (False, True, "graphs")),
        "resume": (config.resume, ("auto", "never", "must")),
        "evaluate.average": (config.evaluate.average, ("logits", "probabilities")),
        "redundancy.scale": (redundancy.scale, ("predicted", "one", "none")),
        "redundancy.terms": (redundancy.terms, ("lhs", "rhs", "both")),
        "tracking.to": (config.tracking.to, ("mlflow", "none")),
        "tracking.model": (config.tracking.model, ("uint8", "float", None)),
    }
    for name, (choice, known) in choices.items():
        if choice not in known:
            words = (word if isinstance(word, str) else json.dumps(word) for word in known)
            raise ValueError(f"{name}={choice}: write one of {', '.join(words)}")
    if "@" in urlsplit(config.tracking.uri or "").netloc:
        raise ValueError(
            "tracking.uri holds a password, which would be written to config.yaml: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
    validate_numbers(config)
    data.validate(config.data)


def validate_numbers(config: Config) -> None:
    size, delta, optimizer = config.ensemble.size, config.redundancy.delta, config.optimizer
    if not (size == "auto" or isinstance(size, int) and 1 <= size <= 1000):
        raise ValueError(f"ensemble.size={size}: write auto or a whole number from 1 to 1000")
    if not (delta == "auto" or isinstance(delta, int | float) and math.isfinite(delta)):
        raise ValueError(f"redundancy.delta={delta}: write auto or a number")
    if not isinstance(optimizer.lr, str) and not (optimizer.lr > 0 and math.isfinite(optimizer.lr)):
        raise ValueError(f"optimizer.lr={optimizer.lr}: write paper, chen2020 or a number above 0")
    for name, share in (("momentum", optimizer.momentum), ("weight_decay", optimizer.weight_decay)):
        if not 0 <= share < 1:
            raise ValueError(f"optimizer.{name}={share}: write a number from 0 to 1")
    start, end = config.schedules.covariance if len(config.schedules.covariance) == 2 else (1, 0)
    if not 0 <= start < end:
        raise ValueError(f"schedules.covariance={config.schedules.covariance}: write [start, end] epochs")
    if config.structure not in config.method.structures:
        raise ValueError(
            f"method={config.method.name} has no structure={config.structure}: "
            f"write structure={config.method.structures[0]}"
        )
    if "/" in config.run.name or not config.run.name.strip():
        raise ValueError(f"run.name={config.run.name!r}: write a name for a folder under run.dir={config.run.dir}")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed}: write a whole number from 0")
    config.schedule()
