"""Find the classes that a config names by module: terms of a method, kinds of trajectory."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any


def construct(
    package: str, name: str, attribute: str, options: Mapping[str, Any], key: str, besides: Sequence[str] = ()
) -> Any:
    """Return an object of the class `attribute` in the package's module `name`.

    For error messages: key is the config key, and besides lists the valid names that are not modules.
    """
    made = class_of(package, name, attribute, key, besides)
    try:
        return made(**options)
    except TypeError as error:
        raise ValueError(f"{key}: {str(error).split('__init__() ')[-1]}") from error


def class_of(package: str, name: str, attribute: str, key: str, besides: Sequence[str] = ()) -> Any:
    known = modules_in(package)
    if name not in known:
        raise ValueError(f"{key}: there is no such {attribute.lower()}; write one of {', '.join([*besides, *known])}")
    return getattr(importlib.import_module(f"{package}.{name}"), attribute)


def modules_in(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))
