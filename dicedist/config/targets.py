"""The user's own objects: a config names them by `_target_`, or Python code hands them over."""

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

LOCAL = "python:"  # prefix of an object that no other process can import
_handed_over: dict[str, Any] = {}


def hand_over(thing: Any, name: str) -> None:
    """Register an object under a name that configs of this process can use."""
    _handed_over[name] = thing


@contextlib.contextmanager
def standing_for(key: str, thing: Any) -> Iterator[None]:
    """Use an object in place of the one that `KEY._target_` names; None changes nothing."""
    before = dict(_handed_over)
    if thing is not None:
        _handed_over[key] = thing
    try:
        yield
    finally:
        _handed_over.clear()
        _handed_over.update(before)


def name_of(thing: Any) -> str:
    """Return the import path of an object, or else a name that only this process knows."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", type(thing).__qualname__)
    importable = module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is thing
    return f"{module}.{name}" if importable else f"{LOCAL}{name}"


def resolve(key: str, target: str, trusted: bool) -> Any:
    """Return the object that a config's `KEY._target_` names: handed over in Python, or imported.

    Importing runs code, so it needs `trusted`: a config may come from somebody else.
    """
    for name in (key, target):
        if name in _handed_over:
            return _handed_over[name]
    if target.startswith(LOCAL):
        raise ValueError(f"{key}._target_={target} was handed over in Python: hand it over again (docs/python.md)")
    if not trusted:
        raise ValueError(f"{key}._target_={target} runs its code: add {key}.trusted=true if you trust it")
    module, _, attribute = target.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {key}._target_={target}: {error}") from error
