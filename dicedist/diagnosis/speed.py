"""The time of a step on the accepted device, and ratios of times that are expected on GPUs.

The expected ratios come from reasoning and from CPUs: no GPU has confirmed them yet.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from dicedist.diagnosis.comparisons import MEMBERS
from dicedist.diagnosis.finding import OK, SLOW, Finding, Lacking
from dicedist.diagnosis.trials import Check, Machine

SIZE = f"ensemble.size={MEMBERS}"
UNWATCHED = "step that nobody watches"  # the row of `bench step` without waits between spans


@dataclass(frozen=True)
class Steps:
    """The steps of a training over some ranks."""

    ranks: int
    keys: tuple[str, ...]
    on_gpus_only: bool = False

    def __str__(self) -> str:
        return f"{' '.join(self.keys)} on {self.ranks} ranks"

    def __call__(self, machine: Machine) -> Finding:
        return Finding(OK, measured(self, machine)[0])


@cache
def measured(steps: Steps, machine: Machine) -> tuple[str, float]:
    """Return the table of `bench step`, and the milliseconds of a step on the slowest rank."""
    if steps.on_gpus_only and not machine.on_gpu:
        raise Lacking("a CPU has no such kernels")
    printed = bench(("step", *steps.keys, SIZE), steps.ranks, machine)
    rows = json.loads((machine.folder / "bench-step.json").read_text())["rows"]
    (times,) = [row for row in rows if row["seconds"] == UNWATCHED]
    return printed, 1000 * max(value for name, value in times.items() if name.startswith("rank"))


@dataclass(frozen=True)
class Expected:
    """A step takes at most `times` as long as another step."""

    steps: Steps
    times: float
    other: Steps

    def __call__(self, machine: Machine) -> Finding:
        if not machine.on_gpu:
            raise Lacking("times are not judged if ranks share a CPU")
        (_, here), (_, there) = measured(self.steps, machine), measured(self.other, machine)
        what = f"{self.steps}: {here:.2f} ms; {self.other}: {there:.2f} ms; {here / there:.2f} times as long"
        if here <= self.times * there:
            return Finding(OK, what)
        return Finding(SLOW, what, f"at most {self.times:g} times as long is expected")


def bench(words: Sequence[str], ranks: int, machine: Machine) -> str:
    return machine.start(["dicedist.bench", *words, *machine.timed_keys], ranks).rstrip()


def speeds() -> dict[str, Check]:
    dice = {ranks: Steps(ranks, ("method=dice",)) for ranks in (1, 2, MEMBERS, MEMBERS + 1)}
    ind = {ranks: Steps(ranks, ("method=ind",)) for ranks in (1, MEMBERS)}
    bf16 = Steps(1, ("method=dice", "precision=bf16"))
    graphs = Steps(1, ("method=dice", "compile=graphs"), on_gpus_only=True)
    recorded = Steps(1, ("method=dice", "redundancy.graph=true"), on_gpus_only=True)
    expected = {
        "w on a rank of its own is hidden behind the members": Expected(dice[MEMBERS + 1], 1.2, ind[MEMBERS]),
        "four ranks share the work": Expected(dice[MEMBERS], 0.5, dice[1]),
        "bf16 is no slower": Expected(bf16, 1.1, dice[1]),
        "CUDA graphs are faster": Expected(graphs, 0.9, dice[1]),
        "w's learning as a graph is faster": Expected(recorded, 0.95, dice[1]),
    }
    timed = [*dice.values(), *ind.values(), bf16, graphs, recorded]
    return {
        **{f"the time of a step: {steps}": steps for steps in timed},
        "members of one device: in turn, grouped, on streams": partial(benched, ("batched", SIZE)),
        "operations of a step": partial(benched, ("launches", SIZE)),
        **expected,
    }


def benched(words: Sequence[str], machine: Machine) -> Finding:
    """Run a benchmark and report it, without a judgment."""
    return Finding(OK, bench(words, 1, machine))
