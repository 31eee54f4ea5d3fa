"""The outcome of one check."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "skipped"
Check = Callable[[], "Finding"]


@dataclass(frozen=True)
class Finding:
    name: str
    state: str
    what: str  # that was found
    remedy: str = ""  # for a warning or a failure


def judged(name: str, what: str, remedy: str = "", *, state: str = WARNING) -> Finding:
    """ok without a remedy, otherwise the given state."""
    return Finding(name, state if remedy else OK, what, remedy)


def findings(checks: Iterator[tuple[str, Check]]) -> Iterator[Finding]:
    """One after the other; a check that raises has failed."""
    for name, check in checks:
        try:
            yield check()
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            yield Finding(name, FAILED, said[:300], "see above; DICEDIST_DEBUG=1 shows where")


@contextlib.contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    began = time.perf_counter()
    yield lambda: time.perf_counter() - began
