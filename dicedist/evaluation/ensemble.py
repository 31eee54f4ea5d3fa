"""The ensemble for inference: images or vectors in, predictions out. From a run, an exported file, or own networks.

It holds only what inference needs: the members without bottleneck, and the discriminator w without its memory.

Legend: M members, N inputs, H rows, W columns, C colours, D features, K classes, P pairs of members,
V values of a vector.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dicedist import metrics
from dicedist.algorithm import networks, objectives
from dicedist.algorithm.discriminator import PairClassifier
from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.networks import Network
from dicedist.config.schema import NetworkConfig
from dicedist.evaluation import inputs
from dicedist.evaluation.about import VECTORS, About
from dicedist.evaluation.answers import Prediction
from dicedist.evaluation.calibration import decisions
from dicedist.runs.run import is_url

IMAGES = ("uint8", "float")
BATCH = 256


class Ensemble(nn.Module):
    """Members that predict together, and say how sure they are.

    `Ensemble.load` opens a run or an exported file, `Ensemble.from_members` takes networks that were trained
    elsewhere. `ensemble.to("cuda")` moves it; `ensemble[0]` and `ensemble[[0, 2]]` are ensembles of some members.

    Examples:
        >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)) for _ in range(3)]
        >>> ensemble = Ensemble.from_members(members, ["cat", "dog"], size=8)
        >>> answers = ensemble.predict(torch.rand(4, 3, 8, 8))  # or PIL images, arrays, paths, a folder
        >>> len(answers.names), len(ensemble[[0, 2]])
        (4, 2)
    """

    scale_C11: Tensor
    shift_C11: Tensor
    pairs_2P: Tensor
    compared_P2: Tensor

    def __init__(
        self, about: About, trunk: nn.Module, encoders: Sequence[nn.Module], classifiers: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.about = about
        self.trunk, self.encoders, self.classifiers = trunk, nn.ModuleList(encoders), nn.ModuleList(classifiers)
        self.feature_dim = max((width(encoders[place]) for place in about.compared), default=0)  # that w reads
        self.w = None
        if about.compared:
            told_classes = len(about.class_names) if about.conditional else 1
            self.w = PairClassifier(len(about.compared), self.feature_dim, told_classes)
        self.fusion, self.fuses = fused_classifier(about)
        each = (-1,) if about.images == VECTORS else (-1, 1, 1)
        std_C11, mean_C11 = (torch.tensor(x, dtype=torch.float64).view(each) for x in (about.std, about.mean))
        brightest = 255 if about.images == "uint8" else 1
        self.constant("scale_C11", (1 / (brightest * std_C11)).float())
        self.constant("shift_C11", (-mean_C11 / std_C11).float())
        self.constant("pairs_2P", torch.triu_indices(len(encoders), len(encoders), offset=1))
        self.constant("compared_P2", torch.combinations(torch.arange(len(about.compared))))
        self.eval().requires_grad_(False)

    @staticmethod
    def load(
        source: str | Path,
        members: Sequence[int] | str | None = None,
        average: str | None = None,
        images: str = "uint8",
        trusted: bool = False,
    ) -> "Ensemble":
        """The ensemble of a run (its last checkpoint), or of a file that `dicedist export` wrote as safetensors or pt2.

        members: numbers, or "student" where the method trains one; all by default. For a run: average, "logits" or
        "probabilities", else the run's own; images, "float" for exact float inputs instead of 8 bits; trusted, to run
        the code of a network class of one's own, which the run only names.
        """
        path = Path(source)
        if is_url(source) or path.suffix not in (".safetensors", ".pt2", ".onnx") or path.is_dir():
            from dicedist.evaluation.loading import load_ensemble

            return load_ensemble(source, listed(members), average, images, trusted)
        from dicedist.evaluation.formats import read

        ensemble = read(path, trusted)
        if average not in (None, ensemble.about.average) or images not in ("uint8", ensemble.about.images):
            raise ValueError(f"{path} was exported with its own average and images: leave these out, or load the run")
        return ensemble if members is None else ensemble[ensemble.places(listed(members))]

    @classmethod
    def from_members(
        cls,
        members: Iterable[nn.Module],
        class_names: Sequence[str] | int,
        size: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        average: str = "probabilities",
        temperature: float = 1.0,
    ) -> "Ensemble":
        """An ensemble of networks that were trained elsewhere, of which it keeps copies.

        Each maps images [N, 3, size, size], scaled to 0..1 and then normalised by mean and std, to logits [N, K].
        class_names may be the number of classes. Without a discriminator, the OOD score is the largest probability.
        """
        members = list(members)
        for number, member in enumerate(members):
            if not isinstance(member, nn.Module):
                raise ValueError(f"member {number} is a {type(member).__name__}: give torch modules")
        copies = [copy.deepcopy(member) for member in members]
        names = [str(label) for label in range(class_names)] if isinstance(class_names, int) else list(class_names)
        about = About(
            run="", step=0, members=list(range(len(copies))), networks=[type(member).__name__ for member in copies],
            target=None, trunk=None, compared=[], conditional=False, class_names=names, mean=list(mean), std=list(std),
            size=size, images="uint8", average=average, temperature=temperature,
        )  # fmt: skip
        ensemble = cls(about, nn.Identity(), copies, [nn.Identity() for _ in copies])
        ensemble.refuse_misfits()
        return ensemble

    def refuse_misfits(self) -> None:
        about, wanted = self.about, [2, len(self.about.class_names)]
        if not self.encoders:
            raise ValueError("there is no member in the list: give at least one network")
        if about.average not in ("logits", "probabilities"):
            raise ValueError(f"average={about.average}: write logits or probabilities")
        if not about.temperature > 0:
            raise ValueError(f"temperature={about.temperature}: write a number above 0")
        for name, values in (("mean", about.mean), ("std", about.std)):
            if len(values) != 3 or not all(math.isfinite(x) and (x > 0 or name == "mean") for x in values):
                raise ValueError(f"{name}={tuple(values)}: give one number for each of 3 colours, a std above 0")
        black = torch.zeros(2, 3, about.size, about.size, device=next(self.encoders.parameters()).device)
        for number, member in enumerate(self.encoders):
            try:
                shape = list(member(black).shape)
            except (RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"member {number} cannot read images {list(black.shape)}: {reason}") from error
            if shape != wanted:
                raise ValueError(f"member {number} makes {shape} of 2 images, where {wanted} logits are needed")

    def predict(self, images: Any, batch_size: int = BATCH) -> Prediction:
        """What the ensemble makes of images: PIL images, arrays, tensors or paths, one or a list of them, or a folder.

        Arrays and tensors are uint8 in 0..255 or floats in 0..1, [N, H, W, 3] or [N, 3, H, W]. Images of another size
        are scaled and cropped as in training. Floats become 8 bits unless the ensemble was loaded with images="float".
        An ensemble of vectors takes an array or tensor [N, V], or a path as data=vectors reads it. In a folder, files
        that cannot be read are left out: `paths` of the answers names those that are answered, `left_out` the others.
        """
        with torch.inference_mode():
            given = inputs.Inputs(images, self.about, batch_size)
            answered = [self.answer(batch.to(self.device)) for batch in given]
            return Prediction.of(self.about, answered, given.paths, given.left_out)

    def features(self, images: Any, batch_size: int = BATCH) -> list[Tensor]:
        """For each member, the features [N, D] that its classifier reads; images as in `predict`."""
        if any(isinstance(classifier, nn.Identity) for classifier in self.classifiers):
            raise ValueError("networks of one's own give logits only: their features are known to themselves")
        with torch.inference_mode():
            given = inputs.Inputs(images, self.about, batch_size)
            read = [self.encode(batch.to(self.device)) for batch in given]
        return [torch.cat([mean_ND.cpu() for mean_ND in of_member]) for of_member in zip(*read, strict=True)]

    @property
    def device(self) -> torch.device:
        return self.scale_C11.device

    def __len__(self) -> int:
        return len(self.about.members)

    def __getitem__(self, index: int | slice | Sequence[int]) -> "Ensemble":
        """Some of the members, by their places in this ensemble; they share its weights, and have no temperature."""
        chosen = range(len(self))[index] if isinstance(index, (int, slice)) else list(index)
        places = [chosen] if isinstance(chosen, int) else list(chosen)
        if not places or len(set(places)) < len(places) or not set(places) <= set(range(len(self))):
            raise ValueError(f"members {places}: the ensemble has places 0 to {len(self) - 1}, name some once each")
        about = self.about.of(places)
        encoders, classifiers = ([modules[place] for place in places] for modules in (self.encoders, self.classifiers))
        part = Ensemble(about, self.trunk, encoders, classifiers).to(self.device)
        if part.fusion is not None and self.fusion is not None:
            part.fusion.load_state_dict(self.fusion.state_dict())
        if part.w is not None and self.w is not None:
            slots = [self.about.compared.index(places[new]) for new in about.compared]
            weights = dict(self.w.state_dict())
            weights["slots_MDH"] = weights["slots_MDH"][slots, : part.feature_dim]
            part.w.load_state_dict(weights)
        return part

    def places(self, members: Any) -> list[int]:
        """Where the run's members of these numbers stand in this ensemble."""
        known = self.about.members
        if not isinstance(members, list) or not set(members) <= set(known):
            raise ValueError(f"members={members}: the file holds the members {known}, name some of them")
        return [known.index(number) for number in members]

    def constant(self, name: str, value: Tensor) -> None:
        """A tensor that moves with the module but is not one of its weights."""
        self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """label: the class [N]; probabilities: those of the ensemble [N, K]; member_logits [N, M, K]; for each input:
        disagreement: the share of pairs of members that predict different classes; 0 for a single member
        confidence: the largest probability after temperature scaling
        entropy, mutual_information: in nats, the whole uncertainty, and the members' disagreement
        ood_score: high means in distribution. The largest probability for logits times mean(1 - w), "DICE x w" in
            the evaluation; without w, the largest probability.
        member_labels [N, M]; and where the ensemble is calibrated, what `decisions` adds
        fused_label [N], fused_probabilities [N, K]: of the fused classifier, where the method trains one (ffl, pcl);
            everything else is of the members and their mean
        """
        if not torch.compiler.is_compiling():  # an exported graph cannot look at its values
            self.refuse_unfit(images)
        return self.answer(images)

    def answer(self, images: Tensor) -> dict[str, Tensor]:
        means, maps = self.read(images)
        heads = zip(self.classifiers, means, strict=True)
        logits_MNK = torch.stack([classifier(mean_ND) for classifier, mean_ND in heads])
        logits_NK = metrics.ensemble_logits(logits_MNK, self.about.average)
        label_N = logits_NK.argmax(1)
        share_N1 = self.independence(means, label_N)[:, None] if self.w is not None else 1.0
        answers = {
            "label": label_N,
            "probabilities": logits_NK.softmax(1).float(),
            "member_logits": logits_MNK.transpose(0, 1).float(),
            "member_labels": logits_MNK.argmax(2).transpose(0, 1),
            "disagreement": self.disagreement(logits_MNK.argmax(2)),
            "confidence": largest(logits_NK / self.about.temperature),
            "entropy": metrics.entropy(logits_NK.log_softmax(1)).float(),
            "mutual_information": metrics.entropies(logits_MNK)["mutual_information"].float(),
            "ood_score": largest(logits_NK * share_N1),
        }
        if self.fusion is not None:
            fused_NK = self.fusion(maps if self.fuses == "map" else means)
            answers |= {"fused_label": fused_NK.argmax(1), "fused_probabilities": fused_NK.softmax(1).float()}
        return answers | decisions(self.about, logits_NK, answers["confidence"], answers["ood_score"])

    def encode(self, images: Tensor) -> list[Tensor]:
        return self.read(images)[0]

    def read(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The features of every member, and its map before pooling where a fused classifier reads it."""
        shared = self.trunk(self.normalise(images))
        if self.fuses != "map":
            return [encoder(shared) for encoder in self.encoders], []
        read = [encoder.outputs(shared) for encoder in self.encoders if isinstance(encoder, Network)]
        return [each[0] for each in read], [each[2].flatten(1) for each in read if each[2] is not None]

    def refuse_unfit(self, images: Tensor) -> None:
        """Images of another type, size or range would be answered, and wrongly."""
        if not isinstance(images, Tensor):
            raise ValueError(
                f"images are a {type(images).__name__}: give a torch tensor (torch.from_numpy of an array)"
            )
        if self.about.images == VECTORS:
            inputs.refuse_unfit_vectors(images, self.about)
            return
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


def fused_classifier(about: About) -> tuple[nn.Module | None, str | None]:
    """The classifier with weights of no meaning, and the field that it reads of every member."""
    if about.fusion is None:
        return None, None
    of_members = [Sizes(**{**size, "map": size["map"] and tuple(size["map"])}) for size in about.fusion["sizes"]]
    term = objectives.named(about.fusion["term"])
    return term.fusion(of_members), term.fuses


def build(about: About, trusted: bool) -> Ensemble:
    """The networks that an ensemble names, with weights of no meaning."""

    def network(name: str) -> Network:
        named = NetworkConfig(name, about.target, trusted, per_member=None)
        shape = (len(about.mean),) if about.images == VECTORS else (3, about.size, about.size)
        return networks.build(replace(named, **(about.options or {})), shape)

    whole = [network(name) for name in about.networks]
    encoders = whole if about.trunk is None else [member.branch() for member in whole]
    trunk = nn.Identity() if about.trunk is None else network(about.trunk).trunk
    classifiers = [nn.Linear(encoder.feature_dim, len(about.class_names)) for encoder in encoders]
    return Ensemble(about, trunk, encoders, classifiers)


def filled(ensemble: Ensemble, weights: Mapping[str, Tensor], origin: Path) -> Ensemble:
    try:
        ensemble.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{origin} is of another network, method or number of classes") from error
    return ensemble


def largest(logits_NK: Tensor) -> Tensor:
    return logits_NK.softmax(1).amax(1).float()


def width(encoder: nn.Module) -> int:
    assert isinstance(encoder, Network)
    return encoder.feature_dim


def listed(members: Sequence[int] | str | None) -> list[int] | str | None:
    return members if members is None or isinstance(members, str) else list(members)
