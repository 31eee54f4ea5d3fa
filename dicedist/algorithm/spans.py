"""Named spans of a step for a listener: the stopwatch of a benchmark, or a profiler. Without a listener they are free.

with listening(torch.profiler.record_function):
    step(batch)
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

Listener = Callable[[str], AbstractContextManager[Any]]  # name -> the context of a span of this name
P = ParamSpec("P")
R = TypeVar("R")
listener: Listener | None = None


@contextlib.contextmanager
def listening(new: Listener) -> Iterator[None]:
    global listener
    listener = new
    try:
        yield
    finally:
        listener = None


def span(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose calls are spans of this name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def named(*arguments: P.args, **options: P.kwargs) -> R:
            if listener is None:
                return function(*arguments, **options)
            with listener(name):
                return function(*arguments, **options)

        return named

    return decorate
