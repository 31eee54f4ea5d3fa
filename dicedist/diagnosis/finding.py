"""The outcome of one check, and how checks are run."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "skipped"
SLOW = "slow"  # works, but takes longer than expected
Check = Callable[[], "Finding"]


@dataclass(frozen=True)
class Finding:
    state: str
    what: str  # the facts that the check found
    remedy: str = ""  # for a warning or a failure


class Lacking(Exception):
    """The machine lacks something that a check needs, so the check is skipped."""


def judged(what: str, remedy: str = "", *, state: str = WARNING) -> Finding:
    """Return a finding: ok without a remedy, otherwise with the given state."""
    return Finding(state if remedy else OK, what, remedy)


def findings(checks: Mapping[str, Check]) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order; a check that raises an exception has failed."""
    for name, check in checks.items():
        try:
            yield name, check()
        except Lacking as error:
            yield name, Finding(SKIPPED, str(error))
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            yield name, Finding(FAILED, said[:500], "see above; DICEDIST_DEBUG=1 shows where")


def refuse_failures(found: Mapping[str, Finding]) -> None:
    if failed := [name for name, finding in found.items() if finding.state == FAILED]:
        raise ValueError(f"{len(failed)} of {len(found)} checks failed: {', '.join(failed)}")


@contextlib.contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    began = time.perf_counter()
    yield lambda: time.perf_counter() - began
