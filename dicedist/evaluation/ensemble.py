"""The ensemble for inference: images in, predictions out. Built from a run or from an exported file alone.

It holds only what inference needs: the members without bottleneck, and the discriminator w without its memory.

Legend: M members, N inputs, H rows, W columns, C colours, D features, K classes, P pairs of members.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad

from dicedist import metrics
from dicedist.algorithm import networks
from dicedist.algorithm.discriminator import PairClassifier
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import Method
from dicedist.config.schema import AVERAGES, Config, NetworkConfig
from dicedist.console.lines import warn
from dicedist.data import sources
from dicedist.evaluation.members import members_or_student
from dicedist.runs.checkpoint import WEIGHTS, Checkpoint
from dicedist.runs.run import Run

IMAGES = ("uint8", "float")
PREPARATION = "the short side is scaled to `size` by bilinear interpolation, and the middle square is taken"


@dataclass(frozen=True)
class About:
    """Everything about an ensemble except its weights, in types that JSON can hold."""

    run: str
    step: int
    members: list[int]  # their numbers in the run
    networks: list[str]  # one per member
    target: str | None  # the user's own network class, used for all members
    trunk: str | None  # the network whose trunk the branches share
    compared: list[int]  # indices into `members` of those that w compares; empty: there is no w
    conditional: bool  # whether w is told the class
    class_names: list[str]
    mean: list[float]  # of images scaled to 0..1
    std: list[float]
    size: int
    images: str  # uint8 [N, H, W, 3] | float [N, 3, H, W] in 0..1
    average: str  # logits | probabilities
    temperature: float
    preparation: str = PREPARATION  # how training and predict bring images of other sizes to `size`


class Ensemble(nn.Module):
    scale_C11: Tensor
    shift_C11: Tensor
    pairs_2P: Tensor
    compared_P2: Tensor

    def __init__(self, about: About, trusted: bool = False):
        super().__init__()
        self.about = about
        whole = [self.network(name, trusted) for name in about.networks]
        encoders = whole if about.trunk is None else [network.branch() for network in whole]
        self.trunk = nn.Identity() if about.trunk is None else self.network(about.trunk, trusted).trunk
        self.encoders = nn.ModuleList(encoders)
        num_classes = len(about.class_names)
        self.classifiers = nn.ModuleList(nn.Linear(encoder.feature_dim, num_classes) for encoder in encoders)
        self.feature_dim = max((encoders[place].feature_dim for place in about.compared), default=0)  # that w reads
        self.w = None
        if about.compared:
            told_classes = num_classes if about.conditional else 1
            self.w = PairClassifier(len(about.compared), self.feature_dim, told_classes)
        std_C11, mean_C11 = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (about.std, about.mean))
        brightest = 255 if about.images == "uint8" else 1
        self.constant("scale_C11", (1 / (brightest * std_C11)).float())
        self.constant("shift_C11", (-mean_C11 / std_C11).float())
        self.constant("pairs_2P", torch.triu_indices(len(whole), len(whole), offset=1))
        self.constant("compared_P2", torch.combinations(torch.arange(len(about.compared))))
        self.eval().requires_grad_(False)

    def network(self, name: str, trusted: bool) -> Network:
        return networks.build(NetworkConfig(name, self.about.target, trusted, per_member=None))

    def constant(self, name: str, value: Tensor) -> None:
        """A tensor that moves with the module but is not one of its weights."""
        self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """label: the class [N]; probabilities: those of the ensemble [N, K]; and for each input, from 0 to 1:
        disagreement: the share of pairs of members that predict different classes; 0 for a single member
        confidence: the largest probability after temperature scaling
        ood_score: high means in distribution. The largest probability for logits times mean(1 - w), "DICE x w" in
            the evaluation; without w, the largest probability.
        """
        if not torch.compiler.is_compiling():  # an exported graph cannot look at its values
            self.refuse_unfit(images)
        inputs = self.trunk(self.normalise(images))
        means = [encoder(inputs) for encoder in self.encoders]
        heads = zip(self.classifiers, means, strict=True)
        logits_MNK = torch.stack([classifier(mean_ND) for classifier, mean_ND in heads])
        logits_NK = metrics.ensemble_logits(logits_MNK, self.about.average)
        label_N = logits_NK.argmax(1)
        share_N1 = self.independence(means, label_N)[:, None] if self.w is not None else 1.0
        return {
            "label": label_N,
            "probabilities": logits_NK.softmax(1).float(),
            "disagreement": self.disagreement(logits_MNK.argmax(2)),
            "confidence": largest(logits_NK / self.about.temperature),
            "ood_score": largest(logits_NK * share_N1),
        }

    def refuse_unfit(self, images: Tensor) -> None:
        """Images of another type, size or range would be answered, and wrongly."""
        if not isinstance(images, Tensor):
            raise ValueError(
                f"images are a {type(images).__name__}: give a torch tensor (torch.from_numpy of an array)"
            )
        about, size, is_uint8 = self.about, self.about.size, self.about.images == "uint8"
        layout, shape = ("uint8 [N, H, W, 3]", (size, size, 3)) if is_uint8 else ("float [N, 3, H, W]", (3, size, size))
        fits = images.dtype == torch.uint8 if is_uint8 else images.is_floating_point()
        if not fits or images.ndim != 4 or tuple(images.shape[1:]) != shape:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}, and this ensemble takes {layout} with "
                f"{size} x {size} pixels: bring them to that first, as training did ({about.preparation})"
            )
        if not images.numel():
            return
        low, high = images.amin().item(), images.amax().item()
        if is_uint8 and high <= 1:
            raise ValueError(f"the brightest pixel is {high:.0f} of 255: were images in 0..1 turned into uint8?")
        if not is_uint8 and not (0 <= low and high <= 1):
            raise ValueError(f"pixels lie in {low:.3g}..{high:.3g}: give images in 0..1, which are normalised in here")

    def normalise(self, images: Tensor) -> Tensor:
        images_NCHW = images.permute(0, 3, 1, 2).float() if self.about.images == "uint8" else images
        return images_NCHW * self.scale_C11 + self.shift_C11

    def disagreement(self, labels_MN: Tensor) -> Tensor:
        first_P, second_P = self.pairs_2P
        differ_PN = labels_MN[first_P] != labels_MN[second_P]
        return differ_PN.float().sum(0) / max(1, len(first_P))

    def independence(self, means: Sequence[Tensor], labels_N: Tensor) -> Tensor:
        """The mean of 1 - w over pairs of compared members; members with fewer features are padded with 0."""
        assert self.w is not None
        compared = [means[place] for place in self.about.compared]
        means_MND = torch.stack([pad(mean_ND, (0, self.feature_dim - mean_ND.shape[1])) for mean_ND in compared])
        classes_N = labels_N if self.about.conditional else torch.zeros_like(labels_N)
        return self.w.independence(means_MND, classes_N, self.compared_P2)

    def load(self, weights: Mapping[str, Tensor], origin: Path) -> "Ensemble":
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{origin} is of another network, method or number of classes") from error
        return self


def largest(logits_NK: Tensor) -> Tensor:
    return logits_NK.softmax(1).amax(1).float()


def load_ensemble(
    run: Run | str | Path,
    members: Any = None,
    average: str | None = None,
    images: str = "uint8",
    trusted: bool = False,
    tell: Callable[[str], None] = warn,
) -> Ensemble:
    """Loads the last intact checkpoint of a run; the images that it was trained on are not needed.

    members: None for all, numbers, or "student". average: None for the run's own. tell: receives warnings.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    found, config = run.checkpoint(), run.config()
    size, method = config.num_members, Method(config.method)
    chosen = members_or_student(members, method, size)
    average = average or config.evaluate.average
    for name, value, known in (("images", images, IMAGES), ("average", average, AVERAGES)):
        if value not in known:
            raise ValueError(f"{name}={value}: write {' or '.join(known)}")
    names = config.network.per_member or [config.network.name] * size
    known_to_w = method.compared(size) if method.adversarial is not None else ()
    compared = [place for place, number in enumerate(chosen) if number in known_to_w]
    about = About(
        run=run.name,
        step=found.step,
        members=chosen,
        networks=[names[number] for number in chosen],
        target=None if config.network.per_member else config.network._target_,
        trunk=names[0] if config.structure == "branch" else None,
        compared=compared if len(compared) > 1 else [],
        conditional=method.adversarial is not None and method.adversarial.conditional,
        size=config.data.size,
        images=images,
        average=average,
        temperature=temperature(run, chosen, average, tell),
        **inputs_and_classes(config, found),
    )
    ensemble = Ensemble(about, trusted)
    return ensemble.load(weights(ensemble, found), found.path)


def inputs_and_classes(config: Config, found: Checkpoint) -> dict[str, Any]:
    """class_names, mean and std, from the checkpoint; an old checkpoint without them needs its images again."""
    if "source" in found.about:
        return dict(found.about["source"])
    source = sources.load(replace(config.data, download=False), labels_only=True)
    if source.data_digest != found.about["data"]:
        raise ValueError(
            f"{found.path} does not say how its images were normalised, and {source.name} has changed since"
        )
    return {name: list(getattr(source, name)) for name in ("class_names", "mean", "std")}


def temperature(run: Run, members: list[int], average: str, tell: Callable[[str], None]) -> float:
    """The temperature of the run's evaluation; for other members or averages, fitted in the same way to its logits."""
    try:
        result = run.result() or {}
        evaluated, fitted = result["member_ids"], result["ensemble_tempered"]["temperature"]
        if (evaluated, result["average"]) != (members, average):
            rows = [evaluated.index(number) for number in members]
            saved = load_file(run.logits_file)
            logits_NK = metrics.ensemble_logits(saved["logits"][rows], average)
            fitted = metrics.split_half(logits_NK, saved["labels"], {})["temperature"]
        return float(fitted or 1)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        tell(f"{run} holds no evaluation of these members: confidences are not calibrated (T = 1)")
        return 1.0


def weights(ensemble: Ensemble, found: Checkpoint) -> dict[str, Tensor]:
    """The checkpoint's weights, by their names in the ensemble."""
    about = ensemble.about
    tensors: dict[str, Tensor] = {}
    for place, number in enumerate(about.members):
        for name, value in part_weights(found, f"member-{number}").items():
            kind, _, rest = name.partition(".")
            if kind in ("encoder", "classifier"):
                tensors[f"{kind}s.{place}.{rest}"] = value
    if about.trunk is not None:
        tensors |= {f"trunk.{name}": value for name, value in part_weights(found, "trunk").items()}
    if about.compared:
        of_w = part_weights(found, "discriminator")
        slots = [about.members[place] for place in about.compared]
        of_w["network.slots_MDH"] = of_w["network.slots_MDH"][slots, : ensemble.feature_dim]
        tensors |= {name.replace("network", "w", 1): x for name, x in of_w.items() if name.startswith("network.")}
    return tensors


def part_weights(found: Checkpoint, part: str) -> dict[str, Tensor]:
    path = found.path / f"{part}.safetensors"
    if path.name not in found.files:
        raise ValueError(f"{found.path} has no {part}: it is of another method or ensemble size")
    with safe_open(path, "pt") as file:
        return {key.removeprefix(WEIGHTS): file.get_tensor(key) for key in file.keys() if key.startswith(WEIGHTS)}
