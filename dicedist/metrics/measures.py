"""The single list of measures: what each is called, which unit it is shown in, and which direction is better.

Evaluation, tables, pages, records and docs read it, so a new measure needs only its function and an entry here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from dicedist.metrics.calibration import ece, tace
from dicedist.metrics.scoring import accuracy, brier, brier_per_class, nll

ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


@dataclass(frozen=True)
class Measure:
    name: str  # in evaluation.json, metrics.jsonl and MLflow
    title: str
    better: str | None  # higher | lower
    decimals: int
    unit: str = ""
    scale: float = 1.0  # factor from the value to the unit
    quick: bool = False  # also measured on validation images after an epoch
    summary: bool = False  # a column of the report's first table
    function: Callable[[Tensor, Tensor], float] | None = None  # takes log_p_NK and labels_N

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def arrow(self) -> str:
        return ARROWS[self.better]


ENSEMBLE = (
    Measure("accuracy", "accuracy", "higher", 2, "%", 100, quick=True, summary=True, function=accuracy),
    Measure("nll", "NLL", "lower", 3, "nats", quick=True, summary=True, function=nll),
    Measure("ece", "ECE", "lower", 2, "%", 100, quick=True, summary=True, function=ece),
    Measure("brier", "Brier", "lower", 3, summary=True, function=brier),
    Measure("brier_per_class", "Brier/K", "lower", 5, function=brier_per_class),
    Measure("tace", "TACE", "lower", 2, "10⁻³", 1000, summary=True, function=tace),
)
TEMPERATURE = Measure("temperature", "T", None, 3)

DIVERSITY = (
    Measure("ratio_error", "ratio-error", "higher", 3, summary=True),
    Measure("q_statistic", "Q-statistic", "lower", 3),
    Measure("agreement", "agreement", "lower", 2, "%", 100),
    Measure("agreement_oracle", "agreement of being right", "lower", 2, "%", 100),
    Measure("kohavi_wolpert", "Kohavi–Wolpert variance", "higher", 4),
    Measure("entropy", "entropy", "higher", 3),
)

REDUNDANCY = Measure("redundancy", "redundancy", "lower", 3, "nats")
FRESH_REDUNDANCY = {  # as evaluation.json calls it, read by a fresh estimator in the same way for every run
    "conditional": Measure("conditional", "I(Zᵢ; Zⱼ | Y)", "lower", 3, "nats"),
    "unconditional": Measure("unconditional", "I(Zᵢ; Zⱼ)", "lower", 3, "nats"),
}

OOD = (
    Measure("fpr95", "FPR at 95 % TPR", "lower", 2, "%", 100),
    Measure("detection", "detection error", "lower", 2, "%", 100),
    Measure("auroc", "AUROC", "higher", 2, "%", 100, summary=True),
    Measure("aupr_in", "AUPR in", "higher", 2, "%", 100),
    Measure("aupr_out", "AUPR out", "higher", 2, "%", 100),
)

OOD_SCORES = {  # name -> title
    "max_softmax": "max softmax",
    "max_softmax_tempered": "max softmax + T",
    "w_only": "1 − w",
    "dice_x_w": "DICE × w",
    "dice_x_w_tempered": "DICE × w + T",
}


def functions(measures: Iterable[Measure]) -> dict[str, Callable[[Tensor, Tensor], float]]:
    return {measure.name: measure.function for measure in measures if measure.function is not None}
