"""Every key of a training: its type, what it means, what it may be, and whom a change of it concerns.

The values stand in conf/. This file and its checks need neither torch nor any file of a run, so that help and refusals
come at once.
"""

import enum
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

STRUCTURES = ("net", "branch")
AVERAGES = ("logits", "probabilities")


class Scope(enum.Enum):
    """What may differ between two starts of a run, between its nodes, and between runs whose results are pooled."""

    RESULT = "changes what is computed: the same at every start and on every node, and runs that differ in it compare"
    IDENTITY = "tells runs of one setting apart: the same at every start and on every node, pooled over by reports"
    LENGTH = "how far the run goes: may change between two starts, and runs that differ in it compare"
    START = "may change between two starts, but not between nodes; changes no result"
    NODE = "may also differ between nodes; changes no result"


def key(
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    above: float | None = None,
    at_least: int | None = None,
    scope: Scope | None = None,
    default: Any = MISSING,
) -> Any:
    """A field with what `--help` says of it and what checks.py holds it to; a group's scope holds for its keys.

    Only a key that conf/ may leave out has a default here.
    """
    limits = {"choices": choices, "above": above, "at_least": at_least}
    return field(default=default, metadata={"help": help, "scope": scope, **limits})


@dataclass
class DataConfig:
    name: str = key("cifar10 | cifar100 | folder | shapes")
    root: str | None = key("null: $DICEDIST_DATA, else ~/.cache/dicedist", scope=Scope.NODE)
    download: bool = key("when the files are not there", scope=Scope.NODE)
    pipeline: str = key("auto: DALI where it can be imported | dali | torch", choices=("auto", "dali", "torch"))
    split: str = key(
        "holdout: val_fraction of the training images is kept for validation | full", choices=("holdout", "full")
    )
    val_fraction: float = key("share of each class that is held out")
    split_seed: int = key("which images are held out", at_least=0)
    train_limit: int | None = key("use only so many training images, as many of each class as possible", at_least=1)
    size: int = key("pixels of a side", at_least=8)
    augment: str = key(
        "basic: random crop and flip | none | cutout: and a square left out", choices=("basic", "none", "cutout")
    )
    cutout_size: int = key("pixels of the square's side", at_least=1)
    per_member: bool = key("true: each member draws its own crops and flips")
    num_threads: int = key("that prepare images, on each rank", at_least=1, scope=Scope.NODE)
    on_corrupt: str = key("an image of a folder that cannot be decoded: skip | refuse", choices=("skip", "refuse"))


@dataclass
class NetworkConfig:
    name: str = key("a name below, or torchvision/<model>, timm/<model>: taken whole, for structure=net")
    _target_: str | None = key(
        "your own class or factory, e.g. my.module.Net; it sets feature_dim, and trunk, tail, trunk_dim for branches"
    )
    trusted: bool = key("true lets _target_ be imported and run", scope=Scope.NODE)
    per_member: list[str] | None = key("names, one for each member, where members differ: [resnet20, resnet32]")

    @property
    def label(self) -> str:
        """What members are, for people."""
        return ", ".join(self.per_member) if self.per_member else self._target_ or self.name


@dataclass
class MethodConfig:
    name: str = key("of the method")
    terms: dict[str, dict[str, Any]] = key("terms of the loss, each with its options")
    structures: list[str] = key("that the method can train")
    title: str = key("how tables and figures call it; empty: by its name", scope=Scope.START, default="")
    meaning: str = key("what it does, in a few words", scope=Scope.START, default="")


@dataclass
class EnsembleConfig:
    size: int | str = key("members; auto: as many as the ranks hold one each (4 in a single process)")
    replicas: int = key("ranks that train a member together, each on its share of the batch", above=0)
    sync_batch_norm: bool = key("whether batch norm is over the whole batch then, or over each share")


@dataclass
class BottleneckConfig:
    log_beta: list[Any] = key("[[epoch, log(beta_ceb)], ...], linear in between")


@dataclass
class RedundancyConfig:
    delta: float | int | str = key(
        "weight of the redundancy loss; auto: the paper's value for this data and number of members"
    )
    delta_by_size: list[Any] = key("[[members, delta], ...]: delta=auto takes the last row of no more members")
    tau: float = key("clip of log f", above=0)
    num_samples: int = key("of z", above=0)
    num_steps: int = key("of the discriminator for one of the members", above=0)
    negatives: int = key("product pairs per joint pair", above=0)
    max_pairs: int | None = key("pairs of members compared in a step; null: all", above=0)
    memory: int = key("inputs kept of each class", above=0)
    lr: float = key("of the discriminator's RMSProp", above=0)
    scale: str = key("noise on z for the discriminator: predicted | one | none", choices=("predicted", "one", "none"))
    terms: str = key("of the Donsker-Varadhan estimate: lhs | rhs | both", choices=("lhs", "rhs", "both"))

    def delta_for(self, num_members: int) -> float:
        if not isinstance(self.delta, str):
            return float(self.delta)
        return float([delta for size, delta in self.delta_by_size if size <= num_members][-1])


@dataclass
class OptimizerConfig:
    lr: float | int | str = key("paper | chen2020 | a number: the paper's schedule from there")
    momentum: float = key("of SGD")
    nesterov: bool = key("whether SGD looks ahead")
    weight_decay: float = key("on every parameter of a member")


@dataclass
class SchedulesConfig:
    reference_epochs: int = key("the length of the run that all knots are given for", above=0)
    scale: bool = key("with other epochs, move every knot in proportion")
    ramp_up: float = key("epochs until redundancy and distillation count in full", above=0)
    covariance: list[float] = key("[start, end] epochs between which w's noise goes from 1 to the predicted scale")
    learning_rate: dict[str, list[Any]] = key("the tables [[epoch, rate], ...] that optimizer.lr may name")


@dataclass
class RunConfig:
    name: str = key("of the run's folder", scope=Scope.IDENTITY)
    dir: str = key("the folder of runs", scope=Scope.NODE)


@dataclass
class LogConfig:
    every_steps: int = key("a record of training in metrics.jsonl", above=0)


@dataclass
class CheckpointConfig:
    every_minutes: float | None = key("save so often; null: not by the clock", above=0)
    every_steps: int | None = key("and after so many steps", above=0)
    every_epochs: int | None = key("and after so many epochs", above=0)
    keep: int = key("checkpoints that stay on the disk", above=0)


@dataclass
class ResumingConfig:
    allow: list[str] = key("keys that are changed on purpose when a run goes on: [optimizer.lr]; written resume.allow")
    step: int | None = key("of the checkpoint to continue from; null: the newest; written resume.step", at_least=1)


@dataclass
class EvaluateConfig:
    average: str = key("logits | probabilities", choices=AVERAGES)
    folds: int = key("random halves of the test set on which temperatures are fitted", above=0)
    every_epochs: int = key("validation", above=0)


@dataclass
class OodConfig:
    sets: dict[str, str | None] = key("name: folder, .npz or .npy; null: by its name in data.root")


@dataclass
class DistributedConfig:
    timeout: float = key("seconds that a rank waits for another", above=0)


@dataclass
class TrackingConfig:
    to: str = key("mlflow | none", choices=("mlflow", "none"))
    uri: str | None = key("null: $MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working folder")
    experiment: str = key("of MLflow")
    model: str | None = key(
        "images that the logged model takes: uint8 (NHWC) | float (NCHW, 0 to 1) | null: no model",
        choices=("uint8", "float", None),
    )
    register: str | None = key("a name: the model is registered under it")


@dataclass
class Config:
    epochs: int = key("passes over the training images", above=0, scope=Scope.LENGTH)
    max_steps: int | None = key("end early, cleanly, after that many steps", above=0, scope=Scope.LENGTH)
    batch_size: int = key("inputs that every member sees in a step", above=0)
    seed: int = key("of everything that is drawn", at_least=0, scope=Scope.IDENTITY)
    precision: str = key("fp32 | bf16 | fp16", choices=("fp32", "bf16", "fp16"))
    compile: bool | str = key(
        "false | true: torch.compile | graphs: and CUDA graphs of what it compiled", choices=(False, True, "graphs")
    )
    resume: str = key(
        "auto: continue the run found in the folder | never | must",
        choices=("auto", "never", "must"),
        scope=Scope.START,
    )
    resuming: ResumingConfig = key("how a run goes on", scope=Scope.START)
    structure: str = key("net: whole networks | branch: one shared trunk", choices=STRUCTURES)
    data: DataConfig = key("the images")
    network: NetworkConfig = key("of a member")
    method: MethodConfig = key("what members minimise")
    ensemble: EnsembleConfig = key("how many members")
    bottleneck: BottleneckConfig = key("VIB and VCEB")
    redundancy: RedundancyConfig = key("the discriminator w")
    optimizer: OptimizerConfig = key("SGD")
    schedules: SchedulesConfig = key("epochs of a run of reference_epochs")
    run: RunConfig = key("where it is kept")
    log: LogConfig = key("records", scope=Scope.START)
    checkpoint: CheckpointConfig = key("saving", scope=Scope.START)
    evaluate: EvaluateConfig = key("measures", scope=Scope.START)
    ood: OodConfig = key("images of other things", scope=Scope.START)
    distributed: DistributedConfig = key("ranks", scope=Scope.START)
    tracking: TrackingConfig = key("MLflow", scope=Scope.NODE)

    @property
    def num_members(self) -> int:
        """Of a run: its size is a number from its start on."""
        if not isinstance(self.ensemble.size, int):
            raise ValueError(f"ensemble.size={self.ensemble.size}, where a run has a number: its config is damaged")
        return self.ensemble.size
