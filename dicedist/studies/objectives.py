"""Objectives of a search: measures of the validation inputs, by their names in metrics.jsonl."""

from dataclasses import dataclass
from typing import Literal

from dicedist.config import names, nearest
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, Measure
from dicedist.reporting.search import Aim


@dataclass(frozen=True)
class Objective(Aim):
    name: str  # of its record, without val/

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.measure.better == "higher" else "minimize"

    def shown(self, value: float) -> str:
        return f"{value * self.measure.scale:.{self.measure.decimals}f}"


def objective(whose: str, measure: Measure) -> Objective:
    of = {names.DIVERSITY: "", names.TEMPERED: "ensemble + T "}.get(whose, f"{whose} ")
    return Objective(of + measure.heading, measure, names.record(whose, measure.name))


OBJECTIVES = [
    *(objective(names.ENSEMBLE, measure) for measure in ENSEMBLE if measure.quick),
    *(objective(names.TEMPERED, measure) for measure in ENSEMBLE if measure.name == "nll"),
    *(objective(names.MEMBERS, measure) for measure in ENSEMBLE if measure.name in ("accuracy", "nll")),
    *(objective(names.DIVERSITY, measure) for measure in DIVERSITY),
]
SHORT = {one.measure.name: one for one in reversed(OBJECTIVES)}  # accuracy is the ensemble's
KNOWN = SHORT | {one.name: one for one in OBJECTIVES}


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Parse one objective or several: nll, or accuracy,ratio_error."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in KNOWN:
            raise ValueError(
                f"--objective {word}: no such measure of validation{nearest(word, [*KNOWN])}; write one of "
                f"{', '.join(SHORT)}, members/accuracy, {names.record(names.TEMPERED, 'nll')}"
            )
    found = tuple(KNOWN[word] for word in words)
    if len(set(found)) < len(found):
        raise ValueError(f"--objective {text}: name every measure once")
    return found
