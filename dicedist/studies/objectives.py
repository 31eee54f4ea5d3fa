"""What a search aims at: measures of the validation inputs, by their names in metrics.jsonl."""

from dataclasses import dataclass
from typing import Literal

from dicedist.config import nearest
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, Measure

MEASURES = {  # name -> measure; in a record with val/ before it
    **{f"ensemble/{measure.name}": measure for measure in ENSEMBLE if measure.quick},
    **{f"members/{measure.name}": measure for measure in ENSEMBLE if measure.name in ("accuracy", "nll")},
    **{f"diversity/{measure.name}": measure for measure in DIVERSITY},
}
SHORT = {name.partition("/")[2]: name for name in reversed(MEASURES)}  # accuracy is the ensemble's


@dataclass(frozen=True)
class Objective:
    name: str

    @property
    def measure(self) -> Measure:
        return MEASURES[self.name]

    @property
    def title(self) -> str:
        owner, _, _ = self.name.partition("/")
        return self.measure.heading if owner == "diversity" else f"{owner} {self.measure.heading}"

    @property
    def record(self) -> str:
        return f"val/{self.name}"

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.measure.better == "higher" else "minimize"

    def shown(self, value: float) -> str:
        return f"{value * self.measure.scale:.{self.measure.decimals}f}"


def objectives_of(text: str) -> tuple[Objective, ...]:
    """nll, or several: accuracy,ratio_error."""
    names = [SHORT.get(word.strip(), word.strip()) for word in text.split(",")]
    for name in names:
        if name not in MEASURES:
            known = [*SHORT, *MEASURES]
            raise ValueError(
                f"--objective {name}: no such measure of validation{nearest(name, known)}; write one of "
                f"{', '.join(SHORT)}, or members/accuracy"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"--objective {text}: name every measure once")
    return tuple(map(Objective, names))
