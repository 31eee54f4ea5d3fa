"""Objects of the user's own: a config names them by `_target_`, or Python code hands them over."""

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

LOCAL = "python:"  # begins the name of an object that no other process can import
_handed_over: dict[str, Any] = {}


def hand_over(thing: Any, name: str) -> None:
    """Let the configs of this process name an object."""
    _handed_over[name] = thing


@contextlib.contextmanager
def standing_for(key: str, thing: Any) -> Iterator[None]:
    """Let an object stand for whatever `KEY._target_` names; None changes nothing."""
    before = dict(_handed_over)
    if thing is not None:
        _handed_over[key] = thing
    yield
    _handed_over.clear()
    _handed_over.update(before)


def name_of(thing: Any) -> str:
    """Return the path by which any process can import an object, or else a name for this process alone."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", type(thing).__qualname__)
    importable = module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is thing
    return f"{module}.{name}" if importable else f"{LOCAL}{name}"


def resolve(key: str, target: str, trusted: bool) -> Any:
    """Return the object that a config's `KEY._target_` names: one that was handed over, or one to import.

    Importing runs code, so it needs `trusted`: a config may come from a stranger.
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
