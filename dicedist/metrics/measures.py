"""The single list of measures, with name, title, unit and better direction of each.

Evaluation, tables, pages, records and docs read this list. A new measure needs only its function, and here an entry
and a meaning.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from dicedist.metrics.calibration import adaptive_ece, classwise_ece, ece, mce, tace
from dicedist.metrics.scoring import accuracy, brier, brier_per_class, hits, nll, squared_errors, surprisals
from dicedist.metrics.selective import accuracy_at_coverage, augrc, aurc, e_aurc, errors_accepted

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
    function: Callable[[Tensor, Tensor], float | None] | None = None  # takes log_p_NK and labels_N
    per_input: Callable[[Tensor, Tensor], Tensor] | None = None  # one value per input, if the measure is their mean

    @property
    def meaning(self) -> str:
        """The definition, for readers who do not know the measure."""
        return MEANINGS.get(self.name, "")

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def arrow(self) -> str:
        return ARROWS[self.better]

    @property
    def column(self) -> str:
        """The head of a column: title, unit, and an arrow in the better direction."""
        return self.heading + self.arrow

    def in_unit(self, value: float | None) -> float | None:
        return None if value is None else self.scale * value


ENSEMBLE = (
    Measure("accuracy", "accuracy", "higher", 2, "%", 100, quick=True, summary=True, function=accuracy, per_input=hits),
    Measure("nll", "NLL", "lower", 3, "nats", quick=True, summary=True, function=nll, per_input=surprisals),
    Measure("ece", "ECE", "lower", 2, "%", 100, quick=True, summary=True, function=ece),
    Measure("brier", "Brier", "lower", 3, summary=True, function=brier, per_input=squared_errors),
    Measure("brier_per_class", "Brier/K", "lower", 5, function=brier_per_class),
    Measure("tace", "TACE", "lower", 2, "10⁻³", 1000, summary=True, function=tace),
)
FURTHER = (  # measured like ENSEMBLE, shown in separate tables
    Measure("adaptive_ece", "adaptive ECE", "lower", 2, "%", 100, function=adaptive_ece),
    Measure("classwise_ece", "classwise ECE", "lower", 3, "%", 100, function=classwise_ece),
    Measure("mce", "MCE", "lower", 2, "%", 100, function=mce),
    Measure("aurc", "AURC", "lower", 4, function=aurc),
    Measure("e_aurc", "E-AURC", "lower", 4, function=e_aurc),
    Measure("augrc", "AUGRC", "lower", 4, function=augrc),
    Measure("accuracy_at_90", "accuracy at 90 % coverage", "higher", 2, "%", 100, function=accuracy_at_coverage),
    Measure("errors_fpr95", "errors accepted with 95 % of the right", "lower", 2, "%", 100, function=errors_accepted),
)
TEMPERATURE = Measure("temperature", "T", None, 3)

UNCERTAINTY = (  # means over inputs; the first is the sum of the other two
    Measure("predictive_entropy", "predictive entropy", None, 3, "nats"),
    Measure("expected_entropy", "expected entropy of a member", None, 3, "nats"),
    Measure("mutual_information", "mutual information", None, 4, "nats"),
)

DIVERSITY = (
    Measure("ratio_error", "ratio-error", "higher", 3, summary=True),
    Measure("q_statistic", "Q-statistic", "lower", 3),
    Measure("agreement", "agreement", "lower", 2, "%", 100),
    Measure("agreement_oracle", "agreement of being right", "lower", 2, "%", 100),
    Measure("kohavi_wolpert", "Kohavi–Wolpert variance", "higher", 4),
    Measure("entropy", "entropy", "higher", 3),
)

SHIFT = (  # at each severity of a shift
    *(measure for measure in (*ENSEMBLE, *FURTHER) if measure.name in ("accuracy", "nll", "ece", "brier", "aurc")),
    Measure("nll_calibrated", "NLL + T of validation", "lower", 3, "nats"),
    Measure("ece_calibrated", "ECE + T of validation", "lower", 2, "%", 100),
    *(measure for measure in DIVERSITY if measure.name == "ratio_error"),
    UNCERTAINTY[-1],
)
SET_SIZE = Measure("set_size", "labels in a set", "lower", 2)
CORRUPTION_ERROR = Measure("mean_error", "mCE (mean error over corruptions and severities)", "lower", 2, "%", 100)

REDUNDANCY = Measure("redundancy", "redundancy", "lower", 3, "nats")
FRESH_REDUNDANCY = {  # name in evaluation.json -> measure; estimated by a fresh discriminator, comparable between runs
    "conditional": Measure("conditional", "I(Zᵢ; Zⱼ | Y)", "lower", 3, "nats"),
    "unconditional": Measure("unconditional", "I(Zᵢ; Zⱼ)", "lower", 3, "nats"),
}

OOD = (
    Measure("fpr95", "OOD accepted with 95 % of ID (FPR95, ID positive)", "lower", 2, "%", 100),
    Measure("fpr95_ood_positive", "ID rejected with 95 % of OOD (FPR95, OOD positive)", "lower", 2, "%", 100),
    Measure("detection", "detection error", "lower", 2, "%", 100),
    Measure("auroc", "AUROC", "higher", 2, "%", 100, summary=True),
    Measure("aupr_in", "AUPR in", "higher", 2, "%", 100),
    Measure("aupr_out", "AUPR out", "higher", 2, "%", 100),
)

OOD_SCORES = {  # name -> title
    "max_softmax": "max softmax",
    "max_softmax_tempered": "max softmax + T",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "max_logit": "max logit",
    "energy": "energy",
    "knn": "KNN",
    "mahalanobis": "Mahalanobis",
    "w_only": "1 − w",
    "dice_x_w": "DICE × w",
    "dice_x_w_tempered": "DICE × w + T",
}

MEANINGS = {  # name -> definition; the report and docs/measures.md quote it
    "accuracy": "share of images whose class is predicted",
    "nll": "negative log-likelihood: minus the mean log-probability of the true class; guessing gives log K",
    "ece": "expected calibration error: mean gap between confidence and accuracy, over 15 equal bins of confidence",
    "brier": "squared distance between the probabilities and the true class, summed over classes",
    "brier_per_class": "Brier divided by the number of classes, as the paper prints it",
    "tace": "thresholded adaptive calibration error: the gap for every class's probability above 0.001, over bins of "
    "equal size",
    "adaptive_ece": "ECE over bins that hold equally many images",
    "classwise_ece": "ECE of each class's own probability, mean over classes",
    "mce": "maximum calibration error: the gap of the worst bin of ECE",
    "aurc": "area under the risk-coverage curve: error rate among the n surest images, mean over n",
    "e_aurc": "excess of AURC over the AURC of an ideal confidence, which ranks all errors last",
    "augrc": "AURC with errors counted among all images",
    "accuracy_at_90": "accuracy on the 90 % most confident images",
    "errors_fpr95": "share of the errors that are accepted when confidence accepts 95 % of the right answers",
    "temperature": "divisor of the logits that minimizes the NLL on one half of the test set; above 1: overconfident",
    "predictive_entropy": "entropy of the ensemble's probabilities: the sum of the next two",
    "expected_entropy": "entropy of a member's probabilities, mean over members",
    "mutual_information": "disagreement of the members about the probabilities",
    "ratio_error": "images that one member of a pair gets wrong, per image that both get wrong",
    "q_statistic": "1 if members are right on the same images, 0 if independently, below if on different ones",
    "agreement": "share of images on which two members predict the same class",
    "agreement_oracle": "share of images on which two members are both right or both wrong",
    "kohavi_wolpert": "variance over members of being right, mean over images",
    "entropy": "Kuncheva and Whitaker's E: 1 if half of the members are right on every image, 0 if all or none",
    "nll_calibrated": "NLL with the temperature that was fitted on validation images",
    "ece_calibrated": "ECE with the temperature that was fitted on validation images",
    "mean_error": "share of shifted images whose class is not predicted, mean over kinds and severities",
    "set_size": "labels in the set that holds the true one with the chosen coverage, mean over images",
    "redundancy": "information that the features of two members share given the class, estimated by the run's own "
    "discriminator",
    "conditional": "the same information, estimated by a new discriminator that is trained alike for every run",
    "unconditional": "all information that the features of two members share, the class included",
    "fpr95": "share of OOD images accepted when 95 % of the test images are",
    "fpr95_ood_positive": "share of test images rejected when 95 % of the OOD images are",
    "detection": "mean of missed and wrongly accepted images at the best threshold",
    "auroc": "probability that a test image scores higher than an OOD image; 50 % is guessing",
    "aupr_in": "area under the precision-recall curve, test images are positive",
    "aupr_out": "area under the precision-recall curve, OOD images are positive",
}
REDUNDANCIES = (REDUNDANCY, *FRESH_REDUNDANCY.values())
OF_PREDICTIONS = (*ENSEMBLE, *FURTHER, TEMPERATURE, SET_SIZE, *UNCERTAINTY)
LISTED = (*OF_PREDICTIONS, *DIVERSITY, *SHIFT, CORRUPTION_ERROR, *REDUNDANCIES, *OOD)
ALL = tuple(dict.fromkeys(LISTED))  # SHIFT repeats some measures


def functions(measures: Iterable[Measure]) -> dict[str, Callable[[Tensor, Tensor], float | None]]:
    return {measure.name: measure.function for measure in measures if measure.function is not None}
