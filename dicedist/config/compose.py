"""Compose conf/*.yaml and the user's overrides to a typed configuration. Each mistake is refused in one line."""

import contextlib
import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dicedist.config.cells import Cells, read_cells
from dicedist.config.checks import check, check_limits
from dicedist.config.literal import in_hydras_words, literal, parsed
from dicedist.config.schema import Config, OodConfig, Scope, keys_of

PACKAGE = Path(__file__).parent.parent
PACKAGED = PACKAGE / "conf"  # in a wheel; in a checkout conf/ is next to the package
CONF = PACKAGED if PACKAGED.exists() else PACKAGE.parent / "conf"
OOD_SETS, OOD_GROUPS = "ood.sets", "ood.groups"
T = TypeVar("T")
# The name of a network may contain a slash, as torchvision/resnet18. The name of a folder may not.
OmegaConf.register_new_resolver("plain", lambda name: name.replace("/", "-"), replace=True)


def compose_config(overrides: Sequence[str]) -> Config:
    """Return conf/train.yaml with the user's overrides, typed and checked; ValueError of one line for a mistake."""
    return compose_once(tuple(overrides))


@functools.cache  # a config is frozen, and Hydra takes a tenth of a second
def compose_once(overrides: tuple[str, ...]) -> Config:
    config = compose_typed("train", overrides, Config)
    if config.ood.left_out:
        by_default = compose_typed("train", [o for o in overrides if not o.startswith(OOD_SETS)], Config)
        refuse_unknown_sets(config.ood, by_default.ood.sets)
        config = replace(config, ood=replace(config.ood, sets=config.ood.measured))
    check(config)
    return config


def refuse_unknown_sets(ood: OodConfig, known: Collection[str]) -> None:
    """Refuse NAME=none for an OOD set that does not exist."""
    for name in ood.left_out:
        if name not in known:
            listed = f"; there are {', '.join(known)}" if known else ""
            raise ValueError(f"{OOD_SETS}.{name}=none: there is no such set{nearest(name, [*known])}{listed}")


def compose_request(name: str, overrides: Sequence[str], schema: type[T]) -> T:
    """Return conf/NAME.yaml of another command with the user's overrides, typed and checked."""
    request = compose_typed(name, overrides, schema)
    check_limits(request)
    return request


def compose_typed(name: str, overrides: Sequence[str], schema: type[T]) -> T:
    for override in overrides:
        if override.startswith(("+", "~")) or "=" not in override:
            hint = f" (did you mean run={override}?)" if Path(override).is_dir() else ""
            raise ValueError(f"{override}: write key=value, with a key that `--help` lists{hint}")
    whole = [override for override in overrides if override.startswith(f"{OOD_SETS}=")]
    overrides = [literal(override) for override in overrides if override not in whole]
    try:
        # The user's own OOD sets and groups are new keys, which Hydra adds only after ++.
        values = composed(name, [f"++{o}" if o.startswith((OOD_SETS, OOD_GROUPS)) else o for o in overrides])
    except HydraException as error:
        raise ValueError(explain(error, name, overrides)) from error
    if whole:  # Hydra would merge the mapping with the sets of the data set
        named = parsed(whole[-1].partition("=")[2])
        if not isinstance(named, dict):
            raise ValueError(f"{whole[-1]}: write {OOD_SETS}={{name: FOLDER_OR_NPZ}}, or {OOD_SETS}={{}} for none")
        single = [override.partition("=")[0].removeprefix(f"{OOD_SETS}.") for override in overrides]
        kept = {key: value for key, value in values.ood.sets.items() if key in single}
        OmegaConf.update(values, OOD_SETS, {**named, **kept}, merge=False, force_add=True)
    return typed(merged(values, schema), schema)


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    Plugins.instance().register(Cells)
    with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
        return compose(name, overrides=[*overrides, f"hydra.searchpath={in_hydras_words([f'cells://{CONF}'])}"])


def merged(values: DictConfig, schema: type) -> DictConfig:
    with mistakes_named():
        config = OmegaConf.merge(OmegaConf.structured(schema), values)
    assert isinstance(config, DictConfig)
    return config


def typed(merged: DictConfig, schema: type[T]) -> T:
    with mistakes_named():
        config = OmegaConf.to_object(merged)
    assert isinstance(config, schema)
    return config


@contextlib.contextmanager
def mistakes_named() -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {in_plain_words(str(error).splitlines()[0])}") from error


def in_plain_words(text: str) -> str:
    """Return OmegaConf's message about a value of the wrong type in plain words."""
    found = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    wanted = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
    return f"{found[1]} is not {wanted[found[2]]}" if found and found[2] in wanted else text


def explain(error: HydraException, name: str, overrides: Sequence[str]) -> str:
    """Return Hydra's error as one line, with the nearest key or option for a misspelled one."""
    text, known = str(error), keys(composed(name, []))
    for override in overrides:
        key, _, value = override.partition("=")
        if key in groups():
            options = choices_of(key)
            if value not in options:
                libraries = ["torchvision/NAME", "timm/NAME"] if key == "network" else []
                listed = ", ".join([*by_folder(options), *libraries])
                return f"{override}: there is no such {key}{nearest(value, options)}; write one of {listed}"
        elif f"'{key}'" in text:
            return f"{key}: there is no such key{nearest(key, known)}"
    return " ".join(text.split())


def groups() -> list[str]:
    """Return the config groups: folders of conf/ from which a training selects one file each."""
    entries = OmegaConf.load(CONF / "train.yaml").defaults
    return sorted(str(group) for entry in entries if entry != "_self_" for group in entry)


def choices_of(group: str) -> list[str]:
    """Return the values of GROUP=: the files of conf/GROUP/, and for experiments the paper's cells."""
    paths = (path for path in (CONF / group).rglob("*.yaml") if not path.stem.startswith("_"))
    names = [path.relative_to(CONF / group).with_suffix("").as_posix() for path in paths]
    return sorted([*names, *read_cells(CONF)] if group == "experiment" else names)


def by_folder(options: Sequence[str]) -> list[str]:
    """Summarize the options of each subfolder, of which there may be hundreds, as one entry."""
    return list(dict.fromkeys(option.partition("/")[0] + "/..." * ("/" in option) for option in options))


def nearest(word: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def keys(config: DictConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in config:
        names.append(prefix + str(key))
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            names += keys(child, f"{prefix}{key!s}.")
    return names


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML for config.yaml, which `parse_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@functools.lru_cache(maxsize=1024)  # a report reads hundreds of runs, each more than once
def parse_config(text: str, origin: object) -> Config:
    """Parse the saved configuration of a run, perhaps someone else's: evaluate nothing in it, and trust no code.

    origin: the name of the text in messages.
    """
    try:
        if any(isinstance(token, yaml.AnchorToken | yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError  # a few lines of aliases can expand to more values than fit in memory
        loaded = OmegaConf.create(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{origin} is missing or damaged") from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{origin} is not the config of a run")
    for key, value in flat(OmegaConf.to_container(loaded)).items():
        if "${" in str(value):
            raise ValueError(f"{origin}: {key} holds an interpolation, which a run's config never does")
    config = typed(with_newer_keys(loaded), Config)
    untrusted = {
        name: replace(getattr(config, name), trusted=False) for name in ("network", "data", "teacher", "method")
    }
    config = replace(config, **untrusted)
    check(config)
    return config


def with_newer_keys(loaded: DictConfig) -> DictConfig:
    """Merge with the schema. Keys that an earlier version lacks get the defaults for its data, network and method."""
    config = merged(loaded, Config)
    missing = OmegaConf.missing_keys(config)
    missing |= {key for key in ("method.title", "method.meaning") if OmegaConf.select(loaded, key) is None}
    if not missing:
        return config
    defaults = usual(*(OmegaConf.select(loaded, f"{group}.name") for group in ("data", "network", "method")))
    for key in missing:
        OmegaConf.update(loaded, key, OmegaConf.select(defaults, key), force_add=True)
    if "data.val_limit" in missing and OmegaConf.select(loaded, "data.train_limit") is not None:
        OmegaConf.update(loaded, "data.val_limit", None)  # data.train_limit did not limit the validation set then
    return merged(loaded, Config)


@functools.cache
def usual(data: str, network: str, method: str) -> DictConfig:
    """Return the default values for the named data, network and method, read-only."""
    named = {"data": data, "network": network, "method": method}
    values = composed("train", [f"{group}={name}" for group, name in named.items() if name in choices_of(group)])
    OmegaConf.set_readonly(values, True)
    return values


def chosen_settings(config: Config) -> dict[str, Any]:
    """Return the keys that affect results and differ from their default for this data, network and method."""
    defaults = flat(OmegaConf.to_container(usual(config.data.name, config.network.name, config.method.name)))
    compared = (Scope.RESULT, Scope.IDENTITY, Scope.LENGTH)
    return {
        key: value
        for key, value in flatten(config).items()
        if value != defaults.get(key) and scope_of(key) in compared and key != "run.name"
    }


def flatten(config: Config) -> dict[str, Any]:
    """Return every key by its full name, with its value."""
    return flat(OmegaConf.to_container(OmegaConf.structured(config)))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {name: leaf for key, value in values.items() for name, leaf in flat(value, f"{prefix}{key}.").items()}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], scopes: Collection[Scope]) -> list[str]:
    """Describe the keys of these scopes that differ between two flattened configurations."""
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and scope_of(key) in scopes
    ]


def scope_of(key: str) -> Scope:
    """Return the scope of a key, or else of its group. A key that the schema does not know is of Scope.RESULT."""
    words = key.split(".")
    above = [keys_of(Config).get(".".join(words[:end])) for end in range(len(words), 0, -1)]
    return next((entry.metadata["scope"] for entry in above if entry and entry.metadata["scope"]), Scope.RESULT)
