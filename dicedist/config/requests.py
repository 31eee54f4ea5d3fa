"""Keys of the commands that read a run: evaluate, predict, export."""

from dataclasses import dataclass
from typing import Any

from dicedist.config.schema import AVERAGES, OOD_SCORES, Frozen, OodConfig, key

FORMATS = ("pt2", "onnx", "safetensors")


@dataclass
class DataRoot(Frozen):
    root: str | None = key("where the data is now, if not where the run found it")
    trusted: bool = key("true lets the run's data._target_ be imported and run")


@dataclass
class Trust(Frozen):
    trusted: bool = key("true lets the run's network._target_ be imported and run")


@dataclass
class TargetsRequest(Frozen):
    """Targets of the calibration. A null key keeps the value of the run."""

    alpha: float | None = key("share of inputs whose set of labels may miss the true one")
    conformal: str | None = key("how sets are made: lac | aps", choices=("lac", "aps", None))
    per_class: bool | None = key("true: every class has the coverage 1 - alpha")
    risk: float | None = key("errors among the answered inputs that are accepted")
    coverage: float | None = key("instead of a risk: the share of inputs that is answered")
    guarantee: float | int | str | None = key("probability that the risk is kept on new inputs | mean")
    ood_score: str | None = key(
        "how unlike the training an input is: knn | max_softmax | dice_x_w | ...", choices=(*OOD_SCORES, None)
    )


@dataclass
class CalibrationRequest(TargetsRequest):
    source: str | None = key("validation | test: for runs of data.split=full", choices=("validation", "test", None))


@dataclass
class EnsembleRequest(Frozen):
    """The choice of an ensemble: a run, its members, its checkpoint."""

    run: str | None = key("the folder of a run, or its URL: s3://BUCKET/runs/NAME")
    members: Any = key("some of them: [0, 2], or student")
    checkpoint: str | None = key("last | best; null: the best if the run keeps it", choices=("last", "best", None))
    average: str | None = key("logits | probabilities; null: as the run evaluates", choices=(*AVERAGES, None))
    calibration: TargetsRequest = key("null: as the run has it")
    network: Trust = key("of the run")


@dataclass
class EvaluateRequest(EnsembleRequest):
    logits: str | None = key(
        "or logits and labels of any ensemble: an .npz with logits [M, N, K] and labels [N], and for a "
        "calibration val_logits and val_labels; or logits.safetensors"
    )
    folds: int | None = key(
        "random halves of the test set on which temperatures are fitted; null: as the run evaluates", above=0
    )
    estimator: str = key(
        "of the redundancy in nats: own: the run's discriminator | fresh: also a new one, the same for every run",
        choices=("own", "fresh"),
    )
    output: str | None = key("a folder; null: the run's own, or for anything but the whole run a folder inside it")
    shift: str | None = key(
        "also on shifted images: corruptions | corruptions_extra | rotations | resolutions | cifar_c | a folder of "
        "class folders"
    )
    shift_severities: list[int] = key("of the shift, from 1 to 5")
    shift_limit: int | None = key("shift so many test images only, as many of each class as possible", at_least=1)
    calibration: CalibrationRequest = key("null: as the run has it")
    ood: OodConfig = key("further sets, name: folder, .npz or .npy; none: dropped from the results")
    data: DataRoot = key("of the run")


@dataclass
class PredictRequest(EnsembleRequest):
    format: str = key("table | jsonl: a JSON object a line", choices=("table", "jsonl"))
    output: str | None = key("a file; null: standard output")
    batch_size: int = key("images at a time", at_least=1)
    device: str = key("auto: the GPU if there is one | cpu | cuda", choices=("auto", "cpu", "cuda"))


@dataclass
class ExportRequest(EnsembleRequest):
    format: str | None = key(
        "pt2: torch.export | onnx | safetensors; null: by the ending of output, else pt2", choices=(*FORMATS, None)
    )
    images: str = key(
        "what the graph takes. uint8: [N, H, W, C] | float: [N, C, H, W] in 0..1", choices=("uint8", "float")
    )
    output: str | None = key("a file; null: in the run, by the names of its members")
