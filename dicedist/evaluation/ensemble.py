"""A trained ensemble, from a run, an exported file, or your own networks: images or vectors in, predictions out.

An ensemble holds only what inference needs: the members without bottleneck, w without its memory, the fused classifier,
and a bank of training features for the OOD score. A shard is the part of an ensemble that one rank evaluates: some of
the members, with their bottlenecks.

Legend: M members, N inputs, H rows, W columns, C channels, D features, K classes, P pairs of members,
R training inputs in the bank, V values of a vector.

A member has a number in its run. Its place is its index in `about.members`. nth is its index among the modules of a
shard. Its slot is its index in `about.compared`, the members that w reads. w is the discriminator of the paper.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dicedist import metrics
from dicedist.algorithm import networks, objectives
from dicedist.algorithm.discriminator import PairClassifier
from dicedist.algorithm.member import Bottleneck
from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.parts import Hosted
from dicedist.config.schema import MOST_CHANNELS, NetworkConfig
from dicedist.config.targets import name_of, resolve, standing_for
from dicedist.evaluation import inputs
from dicedist.evaluation.about import VECTORS, About
from dicedist.evaluation.answers import Prediction
from dicedist.evaluation.calibration import decisions
from dicedist.metrics.features import knn
from dicedist.metrics.ood_scores import DICE_X_W, INDEPENDENCE, KNN, available, needs, score
from dicedist.runs.checkpoint import of_kind
from dicedist.runs.run import is_url

if TYPE_CHECKING:
    from dicedist.evaluation.card import Evaluated
    from dicedist.evaluation.standalone import Evaluation

IMAGES = ("uint8", "float")
BATCH = 256


class Ensemble(nn.Module):
    """Members that predict together, with calibrated confidence.

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
    bank_RMD: Tensor | None

    def __init__(
        self,
        about: About,
        trunk: nn.Module,
        encoders: Sequence[nn.Module],
        classifiers: Sequence[nn.Module],
        bottlenecks: Sequence[nn.Module] = (),
        held: Sequence[int] | None = None,
    ) -> None:
        """held: the places in `about.members` of a shard's members, in the order of the modules; None for all."""
        super().__init__()
        self.about, self.trunk = about, trunk
        self.encoders, self.classifiers = nn.ModuleList(encoders), nn.ModuleList(classifiers)
        self.bottlenecks = nn.ModuleList(bottlenecks)
        self.held = list(range(len(about.members)) if held is None else held)
        self.w: PairClassifier | None = None
        self.fusion: nn.Module | None = None
        self.fused = None if about.fusion is None else objectives.term_class(about.fusion["term"]).fused_head()
        each = (-1,) if about.images == VECTORS else (-1, 1, 1)
        std_C11, mean_C11 = (torch.tensor(x, dtype=torch.float64).view(each) for x in (about.std, about.mean))
        brightest = 255 if about.images == "uint8" else 1
        self.constant("scale_C11", (1 / (brightest * std_C11)).float())
        self.constant("shift_C11", (-mean_C11 / std_C11).float())
        self.constant("pairs_2P", torch.triu_indices(len(about.members), len(about.members), offset=1))
        self.constant("compared_P2", torch.combinations(torch.arange(len(about.compared))))
        self.register_buffer("bank_RMD", None)

    @staticmethod
    def load(
        source: str | Path,
        members: Sequence[int] | str | None = None,
        average: str | None = None,
        images: str = "uint8",
        trusted: bool = False,
        model: Callable[[], nn.Module] | None = None,
    ) -> "Ensemble":
        """Load the last checkpoint of a run, or a file that `dicedist export` wrote as safetensors or pt2.

        members: numbers, or "student" if the method trains one; by default all. average: "logits" or "probabilities";
        by default the run's own (only for a run). images: "float" for exact float inputs instead of 8 bits (only for a
        run). trusted: import and run the user's own network class, which the run names. model: the function that `fit`
        was given, if it cannot be imported.
        """
        path = Path(source)
        with standing_for("network", model):
            if is_url(source) or path.suffix not in (".safetensors", ".pt2", ".onnx") or path.is_dir():
                from dicedist.evaluation.loading import load_ensemble

                return load_ensemble(source, listed(members), average, images, trusted)
            from dicedist.evaluation.formats import read

            ensemble = read(path, trusted)
        if average not in (None, ensemble.about.average) or images not in ("uint8", ensemble.about.images):
            raise ValueError(f"{path} was exported with its own average and images: leave these out, or load the run")
        return ensemble if members is None else ensemble[ensemble.places_of(listed(members))]

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
        """Build an ensemble of copies of networks that were trained elsewhere.

        Each maps images [N, C, size, size], scaled to 0..1 and then normalized by mean and std, to logits [N, K].
        mean and std have a number for each of the C channels. class_names may be the number of classes. Without w, the
        OOD score is the largest probability.
        """
        members = list(members)
        for number, member in enumerate(members):
            if not isinstance(member, nn.Module):
                raise ValueError(f"member {number} is a {type(member).__name__}: give torch modules")
        copies = [copy.deepcopy(member) for member in members]
        about = About(
            run="", step=0, members=list(range(len(copies))), networks=[type(member).__name__ for member in copies],
            target=None, trunk=None, compared=[], conditional=False, class_names=names_of(class_names),
            mean=floats(mean), std=floats(std), size=size, images="uint8", average=average, temperature=temperature,
            gives_logits=True,
        )  # fmt: skip
        refuse_misfits(about)
        ensemble = cls(about, nn.Identity(), copies, [nn.Identity() for _ in copies]).frozen()
        ensemble.refuse_other_outputs()
        return ensemble

    @torch.no_grad()
    def refuse_other_outputs(self) -> None:
        """Raise a ValueError if a member does not return finite logits for two black images."""
        black, wanted = torch.zeros(2, *self.about.input_shape, device=self.device), [2, len(self.about.class_names)]
        for number, member in enumerate(self.encoders):
            try:
                logits = member(black)
            except Exception as error:  # the user's code raises anything
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise ValueError(f"member {number} cannot read images {list(black.shape)}: {reason}") from error
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            if found != wanted:
                raise ValueError(f"member {number} makes {found} of 2 images, where {wanted} logits are needed")
            if not logits.isfinite().all():
                raise ValueError(f"member {number} makes NaN or infinite logits of black images: check its weights")

    def calibrate(self, val: Any, **targets: Any) -> Self:
        """Choose temperature, label sets and thresholds on held-out inputs, for `predict`, `save` and `export`.

        val: a Dataset of (input, class), a DataLoader, or arrays (inputs, classes). targets: keys of `calibration`,
        such as alpha=0.05 or risk=0.02.
        """
        from dicedist.evaluation.standalone import calibrate

        found = calibrate(self, val, targets)
        self.about = replace(
            self.about, temperature=found.temperature, calibration=asdict(found), ood_score=found.ood_score
        )
        return self

    def evaluate(
        self,
        test: Any,
        val: Any = None,
        train: Any = None,
        ood: Mapping[str, Any] | None = None,
        ood_scores: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
        folds: int = 1,
        output: str | Path | None = None,
    ) -> "Evaluation":
        """Measure accuracy, likelihood, calibration, diversity, uncertainty and OOD detection.

        test, val, train: as in `calibrate`. val calibrates for this evaluation if the ensemble is not calibrated. train
        gives the features for nearest neighbors. ood: name -> inputs, a folder or an .npz. ood_scores: name -> a
        function of logits [members, inputs, classes] and features [members, inputs, width], which returns a number for
        each input, high for known inputs; networks trained elsewhere pass their logits as features. output: the folder
        of a new run, for `dicedist.Run.open(output).report()` and `dicedist report`.
        """
        from dicedist.evaluation.standalone import evaluate

        sets, scores = ({} if given is None else given for given in (ood, ood_scores))
        return evaluate(self, test, val, train, sets, scores, folds, output)

    def save(self, path: str | Path, model: Callable[[], nn.Module] | None = None) -> Path:
        """Write the weights and everything that prediction needs to a .safetensors file, which `load` reads.

        model: builds one member, if the ensemble comes from `from_members`. The file stores its import path.
        `Ensemble.load(path, trusted=True)` imports it; `Ensemble.load(path, model=...)` uses the given function.
        """
        if self.about.gives_logits and model is not None:
            self.about = replace(self.about, target=name_of(model))
        with standing_for("network", model):
            return self.export(Path(path).with_suffix(".safetensors"))

    def export(self, path: str | Path) -> Path:
        """Write a .pt2 or .onnx graph, which runs without dicedist, and check its answers against these networks."""
        from dicedist.evaluation.formats import FORMATS, export, random_inputs

        path = Path(path)
        if path.suffix.removeprefix(".") not in FORMATS:
            raise ValueError(f"{path}: write a file that ends in .{', .'.join(FORMATS)}")
        if path.suffix == ".safetensors" and self.about.gives_logits and self.about.target is None:
            raise ValueError("networks trained elsewhere are built by your code: write save(path, model=make_network)")
        export(self, path, path.suffix.removeprefix("."), random_inputs(self.about))
        return path

    def push_to_hub(
        self,
        name: str,
        run: "Evaluated | None" = None,
        model: Callable[[], nn.Module] | None = None,
        license: str | None = None,
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Upload the ensemble with a model card to the Hugging Face Hub as "user/name", and return the commit's URL.

        run: the evaluated run, `dicedist.Run.open(folder)`, for the measures, calibration and figures of the card;
        without it the card only describes the ensemble. model: as in `save`. token: by default from `hf auth login`.
        """
        from dicedist.evaluation.hub import push

        return push(self, name, run, model, license, private, token)

    @staticmethod
    def from_pretrained(
        source: str | Path,
        revision: str | None = None,
        token: str | None = None,
        trusted: bool = False,
        model: Callable[[], nn.Module] | None = None,
    ) -> "Ensemble":
        """Load the ensemble that `push_to_hub` uploaded as "user/name", or a folder with the same files.

        revision: a branch, tag or commit. trusted and model: as in `load`.
        """
        from dicedist.evaluation.hub import pull

        return pull(source, revision, token, trusted, model)

    def predict(self, images: Any, batch_size: int = BATCH) -> Prediction:
        """Predict PIL images, arrays, tensors or paths, one or a list of them, or a folder of images.

        Arrays and tensors are uint8 in 0..255 or floats in 0..1, [N, H, W, C] or [N, C, H, W], gray ones also
        [N, H, W]. Photos become gray if the ensemble reads one channel. Images of another size are scaled and cropped
        as in training. Floats become 8 bits unless the ensemble was loaded with images="float".
        An ensemble of vectors takes an array or tensor [N, V], or a path as data=vectors reads it. Unreadable files of
        a folder are left out: `paths` of the answers lists the files that were read, `left_out` the others.
        """
        with torch.inference_mode():
            given = inputs.Inputs(images, self.about, batch_size)
            answered = [refuse_nan(self.answer(batch.to(self.device))) for batch in given]
            return Prediction.of(self.about, answered, given.paths, given.left_out)

    def features(self, images: Any, batch_size: int = BATCH) -> list[Tensor]:
        """Return for each member the features [N, D] that its classifier reads; images as in `predict`."""
        if any(isinstance(classifier, nn.Identity) for classifier in self.classifiers):
            raise ValueError("networks trained elsewhere return logits only: read their features in your own code")
        with torch.inference_mode():
            given = inputs.Inputs(images, self.about, batch_size)
            read = [self.encode(self.normalize(batch.to(self.device)))[0] for batch in given]
        return [torch.cat([mean_ND.cpu() for mean_ND in of_member]) for of_member in zip(*read, strict=True)]

    @property
    def device(self) -> torch.device:
        return self.scale_C11.device

    def __len__(self) -> int:
        return len(self.about.members)

    def __getitem__(self, index: int | slice | Sequence[int]) -> "Ensemble":
        """Return an ensemble of some members, by their places. It shares their weights and has no temperature."""
        chosen = range(len(self))[index] if isinstance(index, (int, slice)) else list(index)
        places = [chosen] if isinstance(chosen, int) else list(chosen)
        if not places or len(set(places)) < len(places) or not set(places) <= set(range(len(self))):
            raise ValueError(f"members {places}: the ensemble has places 0 to {len(self) - 1}, name some once each")
        about = self.about.of(places)
        encoders, classifiers = ([modules[place] for place in places] for modules in (self.encoders, self.classifiers))
        part, weights = Ensemble(about, self.trunk, encoders, classifiers), dict(self.state_dict())
        if about.compared:
            slots = [self.about.compared.index(places[new]) for new in about.compared]
            weights["w.slots_MDH"] = weights["w.slots_MDH"][slots]
        if self.bank_RMD is not None:
            weights["bank_RMD"] = self.bank_RMD[:, places]
        return part.with_heads(weights).to(self.device).frozen()

    def places_of(self, members: Any) -> list[int]:
        """Return the places of the members that have these numbers in the run."""
        known = self.about.members
        if not isinstance(members, list) or not set(members) <= set(known):
            raise ValueError(f"members={members}: the file holds the members {known}, name some of them")
        return [known.index(number) for number in members]

    def constant(self, name: str, value: Tensor) -> None:
        """Register a tensor that moves with the module but is not one of its weights."""
        device = next((parameter.device for parameter in self.parameters()), value.device)
        self.register_buffer(name, value.to(device), persistent=False)

    @classmethod
    def shard(cls, about: About, hosted: Hosted) -> "Ensemble":
        """Build a shard from the members on this rank. Nothing is copied, so the members can keep learning."""
        members = [hosted.member(number) for number in hosted.members]
        return cls(
            about,
            nn.Identity() if hosted.trunk is None else hosted.trunk.module,
            [member.encoder for member in members],
            [member.classifier for member in members],
            [member.bottleneck for member in members if member.bottleneck is not None],
            [about.members.index(number) for number in hosted.members],
        )

    def with_heads(self, weights: dict[str, Tensor]) -> Self:
        """Add the modules that read all members: w, the fused classifier (ffl, pcl), and the bank of the OOD score.

        weights: by their names in the ensemble.
        """
        about = self.about
        if about.compared:
            classes = len(about.class_names) if about.conditional else 1
            _, features, hidden = weights["w.slots_MDH"].shape
            self.w = PairClassifier(len(about.compared), features, classes, hidden)
            self.w.to(self.device).load_state_dict(of_kind("w.", weights))
        if about.fusion is not None and self.fused is not None:
            known = [Sizes(**{**size, "map": size["map"] and tuple(size["map"])}) for size in about.fusion["sizes"]]
            self.fusion = self.fused.build(known)
            self.fusion.to(self.device).eval().load_state_dict(of_kind("fusion.", weights))
        if about.ood_score == KNN:
            self.bank_RMD = weights["bank_RMD"].to(self.device)
            if self.bank_RMD.ndim != 3 or self.bank_RMD.shape[1] != len(about.members) or not len(self.bank_RMD):
                raise IndexError(f"a bank of shape {list(self.bank_RMD.shape)} for {len(about.members)} members")
        return self

    def frozen(self) -> Self:
        return self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return `label` [N], `member_logits` [N, M, K], and the other fields with names and shapes of `Prediction`.

        calibration.ood_score names the OOD score, by default KNN: the distance to training features. Files of earlier
        versions use "DICE x w", or the largest probability without w.
        """
        if not torch.compiler.is_compiling():  # an exported graph cannot check values
            inputs.refuse_unfit(images, self.about)
        return self.answer(images)

    def answer(self, images: Tensor) -> dict[str, Tensor]:
        means, fields = self.encode(self.normalize(images))
        logits_MNK = torch.stack(self.classify(means))
        logits_NK = metrics.ensemble_logits(logits_MNK, self.about.average)
        label_N = logits_NK.argmax(1)
        answers = {
            "label": label_N,
            "probabilities": logits_NK.softmax(1).float(),
            "member_logits": logits_MNK.transpose(0, 1).float(),
            "member_labels": logits_MNK.argmax(2).transpose(0, 1),
            "disagreement": self.disagreement(logits_MNK.argmax(2)),
            "confidence": largest(logits_NK / self.about.temperature),
            "entropy": metrics.entropy(logits_NK.log_softmax(1)).float(),
            "mutual_information": metrics.entropies(logits_MNK)["mutual_information"].float(),
            "ood_score": self.ood_score(means, logits_MNK, label_N),
        }
        if self.fusion is not None:
            fused_NK = self.fusion(fields)
            answers |= {"fused_label": fused_NK.argmax(1), "fused_probabilities": fused_NK.softmax(1).float()}
        return answers | decisions(self.about, logits_NK, answers["confidence"], answers["ood_score"])

    def ood_score(self, means: Sequence[Tensor], logits_MNK: Tensor, label_N: Tensor) -> Tensor:
        """Return the OOD score of each input, by `score_name`."""
        name, feature_scores = self.score_name, {}
        if name == KNN and self.bank_RMD is not None:
            width = self.bank_RMD.shape[2]
            features_MND = torch.stack([pad(own_ND, (0, width - own_ND.shape[1])) for own_ND in means])
            feature_scores[KNN] = knn(self.bank_RMD, features_MND)
        elif needs(name) == INDEPENDENCE:
            feature_scores[INDEPENDENCE] = self.independence(means, label_N)
        return score(name, logits_MNK, self.about.average, feature_scores).float()

    @property
    def score_name(self) -> str:
        """Return the name of the OOD score: from `about`, or the largest probability if this score is unavailable."""
        parts = {KNN: self.bank_RMD, INDEPENDENCE: self.w}
        return available(self.about.ood_score or DICE_X_W, {name for name, part in parts.items() if part is not None})

    def encode(self, normalized: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return for every member held here its features, and the field that the fused classifier reads."""
        shared = self.trunk(normalized)
        if self.fused is None or self.fused.reads != "map":
            means = [encoder(shared) for encoder in self.encoders]
            return means, means
        read = [encoder.outputs(shared) for encoder in self.encoders if isinstance(encoder, Network)]
        return [each[0] for each in read], [each[2].flatten(1) for each in read if each[2] is not None]

    def classify(self, means: Sequence[Tensor]) -> list[Tensor]:
        return [classifier(mean_ND) for classifier, mean_ND in zip(self.classifiers, means, strict=True)]

    def scales(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the scales of the features; 1 for deterministic members."""
        if not self.bottlenecks:
            return [torch.ones_like(mean_ND) for mean_ND in means]
        return [bottleneck(mean_ND)[0] for bottleneck, mean_ND in zip(self.bottlenecks, means, strict=True)]

    def normalize(self, images: Tensor) -> Tensor:
        images_NCHW = images.permute(0, 3, 1, 2).float() if self.about.images == "uint8" else images
        return images_NCHW * self.scale_C11 + self.shift_C11

    def disagreement(self, labels_MN: Tensor) -> Tensor:
        first_P, second_P = self.pairs_2P
        differ_PN = labels_MN[first_P] != labels_MN[second_P]
        return differ_PN.float().sum(0) / max(1, len(first_P))

    def independence(self, means: Sequence[Tensor], labels_N: Tensor) -> Tensor:
        """Return the mean of 1 - w over pairs of compared members; members with fewer features are padded with 0."""
        assert self.w is not None
        read = self.w.slots_MDH.shape[1]
        compared = [pad(means[place], (0, read - means[place].shape[1])) for place in self.about.compared]
        return self.w.independence(torch.stack(compared), labels_N, self.compared_P2)


def build_members(about: About, trusted: bool, places: Sequence[int]) -> tuple[nn.Module, list[Any], list[nn.Module]]:
    """Build the trunk, the encoders and the classifiers of some members, with random weights."""

    def network(name: str) -> Network:
        named = NetworkConfig(name, about.target, trusted, per_member=None)
        return networks.build(replace(named, **(about.options or {})), about.input_shape)

    if about.gives_logits and about.target is not None:
        made = [resolve("network", about.target, trusted)() for _ in places]
        return nn.Identity(), made, [nn.Identity() for _ in places]
    # One at a time: a branch does not keep its copy of the trunk.
    whole = (network(about.networks[place]) for place in places)
    encoders = [own if about.trunk is None else own.branch() for own in whole]
    classifiers: list[nn.Module] = [nn.Linear(own.feature_dim, len(about.class_names)) for own in encoders]
    trunk = nn.Identity() if about.trunk is None or not encoders else network(about.trunk).trunk
    return trunk, encoders, classifiers


def as_in_training(ensemble: Ensemble) -> Ensemble:
    """Change to the memory format of training, which is faster for convolutions and rounds differently."""
    for module in (ensemble.trunk, ensemble.encoders, ensemble.classifiers):
        module.to(memory_format=torch.channels_last)
    return ensemble


def restored(
    about: About, trusted: bool, weights: dict[str, Tensor], origin: Path, held: Sequence[int] | None = None
) -> Ensemble:
    """Build the ensemble of these weights, which are named as in the ensemble. held: of a shard, without heads."""
    places = range(len(about.members)) if held is None else held
    misfit = ValueError(f"{origin} is of another network, method or number of classes")
    try:
        if places and is_larger(about, len(places), weights):
            raise IndexError  # building it could take all memory or time
        trunk, encoders, classifiers = build_members(about, trusted, places)
        sampled = any(name.startswith("bottlenecks.") for name in weights)
        bottlenecks = [Bottleneck(encoder.feature_dim, prior_rows=0) for encoder in encoders if sampled]
        ensemble = Ensemble(about, trunk, encoders, classifiers, bottlenecks, held)
        if held is None:
            ensemble.with_heads(weights)
    except (RuntimeError, LookupError, TypeError, AttributeError, AssertionError) as error:
        if trusted and about.target:
            raise  # the user's own code may have raised it
        raise misfit from error
    try:
        ensemble.load_state_dict(weights)
    except RuntimeError as error:
        raise misfit from error
    return ensemble.frozen()


def is_larger(about: About, num_members: int, weights: dict[str, Tensor]) -> bool:
    """Return whether a description needs more than the given weights; check before building."""
    widest = max((size for value in weights.values() for size in value.shape), default=0)
    options, sizes = about.options or {}, (about.fusion or {}).get("sizes", ())
    asked = [options.get(name) or 0 for name in ("width", "feature_dim")]
    asked += [value for size in sizes for value in (size["features"], size["classes"], *(size.get("map") or ()))]
    if "mlp" in about.networks and about.images != VECTORS:
        asked.append(math.prod(about.input_shape))
    return max(num_members, options.get("depth") or 0) > len(weights) or max(asked) > widest


def names_of(class_names: Sequence[str] | int) -> list[str]:
    names = [str(label) for label in range(class_names)] if isinstance(class_names, int) else list(class_names)
    if len(names) < 2 or isinstance(class_names, str):
        raise ValueError(f"class_names={class_names!r}: give the names of at least two classes, or their number")
    return names


def floats(values: Any) -> list[float]:
    """Return the mean or std of each channel in a type that JSON can hold."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"mean or std is {values!r}: give one number for each channel") from error


def refuse_misfits(about: About) -> None:
    """Raise a ValueError if networks from elsewhere cannot be an ensemble of this description."""
    if not about.members:
        raise ValueError("there is no member in the list: give at least one network")
    if not isinstance(about.size, int) or about.size < 1:
        raise ValueError(f"size={about.size}: write the side of the images in pixels, a whole number from 1")
    if about.average not in ("logits", "probabilities"):
        raise ValueError(f"average={about.average}: write logits or probabilities")
    if not 0 < about.temperature < math.inf:
        raise ValueError(f"temperature={about.temperature}: write a number above 0")
    fits = 0 < len(about.mean) == len(about.std) <= MOST_CHANNELS and min(about.std) > 0
    if not fits or not all(math.isfinite(x) for x in (*about.mean, *about.std)):
        both = f"mean={tuple(about.mean)} and std={tuple(about.std)}"
        raise ValueError(f"{both}: give one number for each channel, a std above 0")


def largest(logits_NK: Tensor) -> Tensor:
    return logits_NK.softmax(1).amax(1).float()


def refuse_nan(answers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the answers of a batch. Raise a ValueError if a member gave NaN: the label would be meaningless."""
    broken_M = answers["member_logits"].isnan().any(2).any(0)
    if broken_M.any():
        place = int(broken_M.int().argmax())
        raise ValueError(f"the member at place {place} gave NaN logits: check its weights, or leave it out")
    return answers


def listed(members: Sequence[int] | str | None) -> list[int] | str | None:
    return members if members is None or isinstance(members, str) else list(members)
