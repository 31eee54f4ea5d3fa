"""Computes every measure of an ensemble whose members may be on any rank; the results go into a folder.

Legend: M members, N inputs, D features, K classes, P pairs of members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.parts import Hosted
from dicedist.cluster.control import Control
from dicedist.config.schema import CalibrationConfig, EvaluateConfig, OodConfig
from dicedist.console.lines import plural, warn
from dicedist.console.progress import Stage, silent
from dicedist.data.ood import load_ood
from dicedist.data.sources import Source, Split, part, some_of_each
from dicedist.evaluation import calibration
from dicedist.evaluation.detection import EVERY_SET, Scorer, detect
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.fusing import Fusing
from dicedist.evaluation.readings import Readings, read
from dicedist.evaluation.redundancy import estimate, fresh_estimates
from dicedist.metrics.features import Reference

BATCH = 500
GALLERY = 24
REFERENCE = 10_000  # training images, whose features OOD scores compare with
UNION = "tinyimagenet_lsun_isun"  # a row of the paper's tables: all images of these sets as one
UNITED = ("tinyimagenet_crop", "tinyimagenet_resize", "lsun_crop", "lsun_resize", "isun")
MOST_READ = 50_000  # inputs whose features are gathered
FEATURES = ("means_ND", "scales_ND")
EVERYTHING = ("logits_NK", *FEATURES)


@dataclass
class Evaluator:
    """All ranks create one and call its methods together; the reporter gets the results, the others None."""

    hosted: Hosted  # keyed by member number
    members: Sequence[int]  # the ensemble that is evaluated
    hosts: Sequence[int]  # the rank that reads each of them
    control: Control
    device: torch.device
    source: Source
    discriminator: Discriminator | None  # w, needed on the reporter only; knows all members except a student
    feature_dims: Sequence[int]
    step: int  # after which the members are evaluated
    student: int | None = None  # the member that the method trains to be used alone
    fresh: bool = False  # also estimate redundancy by new discriminators, which takes minutes
    stage: Stage = silent  # shows how far the reading of a split has come
    fusing: Fusing | None = None  # where the method trains a fused classifier, and all members are evaluated

    def collect(
        self, split: Split, noun: str, wanted: Sequence[str] = EVERYTHING, fuses: bool = False
    ) -> Readings | None:
        """What is wanted of all members' logits [M, N, K], means and scales [M, N, D], on the reporter; else empty.

        fuses: also the logits of the fused classifier, if there is one.
        """
        progress = self.stage(len(split), noun)
        own = read(self.hosted, split, self.source, BATCH, self.device, progress, self.fusing if fuses else None)
        progress.clear()
        places = {member: place for place, member in enumerate(self.members)}
        columns: list[Tensor | None] = []
        for name, widths in (
            ("logits_NK", [self.source.num_classes] * len(self.members)),
            ("means_ND", self.feature_dims),
            ("scales_ND", self.feature_dims),
        ):
            if name not in wanted:
                columns.append(torch.empty(len(self.members), 0, 0))
                continue
            mine = {places[member]: getattr(readings, name) for member, readings in own.items()}
            received = self.control.collect(mine, [(len(split), width) for width in widths], self.hosts)
            widest = max(widths)
            columns.append(
                torch.stack([torch.nn.functional.pad(row, (0, widest - row.shape[1])) for row in received])
                if received is not None
                else None
            )
        logits_MNK, means_MND, scales_MND = columns
        if logits_MNK is None or means_MND is None or scales_MND is None:
            return None
        return Readings(logits_MNK, means_MND, scales_MND, self.fusing.take() if self.fusing and fuses else None)

    def evaluate(
        self, config: EvaluateConfig, ood: OodConfig, targets: CalibrationConfig, data_root: str | None
    ) -> Findings | None:
        """Measures the test set, the redundancy of held-out features and the OOD sets; chooses the thresholds."""
        average, val = config.average, self.source.val
        images, missing = load_ood(ood.sets, self.source, data_root)
        test = self.collect(self.source.test, f"test {self.source.kind}", fuses=True)
        held_out = self.collect(val, f"validation {self.source.kind}") if len(val) else test
        fresh = self.fresh_redundancy() if self.fresh else None
        outside = {
            name: self.collect(
                Split(pixels, torch.zeros(len(pixels), dtype=torch.int64)), f"{self.source.kind} of {name}"
            )
            for name, pixels in images.items()
        }
        reference = self.reference() if images else None
        if test is None or held_out is None:
            return None
        outside |= union_of(outside)
        labels_N = self.source.test.labels_N
        held_out_labels_N = val.labels_N if len(val) else labels_N
        result: dict[str, Any] = {
            "step": self.step,
            "member_ids": list(self.members),
            "average": average,
            "class_names": self.source.class_names,
            **measured(test.logits_NK, labels_N, average, config.folds),
            "redundancy": self.redundancy(held_out, held_out_labels_N),
            "ood_missing": missing,
        }
        if fresh is not None:
            result["redundancy_fresh"] = fresh
        tensors = {"logits": test.logits_NK, "labels": labels_N}
        score = self.scorer(test, average, result["ensemble_tempered"]["temperature"] or 1.0, reference)
        found = {name: readings for name, readings in outside.items() if readings is not None}
        groups = ood.groups or {EVERY_SET: list(images)}
        result |= detect(score(test), {name: score(readings) for name, readings in found.items()}, groups)
        tensors |= {f"ood.{name}": readings.logits_NK for name, readings in found.items() if name != UNION}
        if len(val) or targets.source == "test":
            chosen_on = (test, labels_N) if targets.source == "test" else (held_out, held_out_labels_N)
            result["calibration"], kept = self.calibrate(*chosen_on, test, average, targets, score)
            tensors |= kept
        if test.fused_NK is not None:
            result["fused"] = metrics.measure(test.fused_NK[None], labels_N, average, config.folds)["ensemble"]
            tensors["fused"] = test.fused_NK
        if self.student in self.members:
            result["student"] = result["members"]["per_member"][self.members.index(self.student)]
        shown = gallery(test.logits_NK, self.source.test, average) if self.source.kind == "images" else {}
        return Findings(result, tensors, shown)

    def calibrate(
        self,
        readings: Readings,
        labels_N: Tensor,
        test: Readings,
        average: str,
        config: CalibrationConfig,
        score: Scorer,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For evaluation.json; and what it was chosen from, so that other members or targets can be calibrated too."""
        scores_N = score.used(readings)
        fitted = calibration.fit(readings.logits_NK, labels_N, average, config, scores_N)
        test_labels_N = self.source.test.labels_N
        came_to = calibration.tested(fitted, test.logits_NK, test_labels_N, average, score.used(test))
        kept = {
            calibration.LOGITS: readings.logits_NK.clone(),  # perhaps those of the test set
            calibration.LABELS: labels_N.clone(),
            calibration.SCORES: scores_N,
        }
        return {**asdict(fitted), "test": came_to}, kept

    def scorer(self, test: Readings, average: str, temperature: float, reference: Reference | None) -> Scorer:
        """Temperatures of scores follow the paper's protocol on test, as its tables do."""
        if self.discriminator is None or len(self.compared) < 2:
            return Scorer(average, None, reference, temperature)
        logits_NK = metrics.ensemble_logits(test.logits_NK, average)
        scaled_NK = logits_NK * self.independence(test, logits_NK)[:, None]
        own = metrics.split_half(scaled_NK, self.source.test.labels_N, {})["temperature"] or 1.0
        return Scorer(average, self.independence, reference, temperature, own)

    def reference(self) -> Reference | None:
        """Features of training images, of every class as many as possible: what KNN and Mahalanobis compare with."""
        labels_N = self.source.train.labels_N
        rows_N = some_of_each(labels_N, REFERENCE)
        readings = self.collect(part(self.source.train, rows_N), f"training {self.source.kind}, for OOD scores")
        return None if readings is None else Reference.of(readings.means_ND, labels_N[rows_N], self.source.num_classes)

    @property
    def compared(self) -> list[int]:
        """The evaluated members that the run's discriminator w knows."""
        return [member for member in self.members if member != self.student]

    @property
    def pairs_P2(self) -> Tensor:
        return torch.tensor(list(combinations(self.compared, 2)), dtype=torch.int64).view(-1, 2)

    def slots(self, values_MND: Tensor) -> Tensor:
        """The evaluated members at their places among all members of the run; the others are zero and not compared."""
        assert self.discriminator is not None
        width = self.discriminator.network.slots_MDH.shape[1]
        slots = torch.zeros(self.discriminator.num_members, values_MND.shape[1], width)
        for member in self.compared:
            own_ND = values_MND[self.members.index(member), :, :width]  # a student may have more features than w reads
            slots[member, :, : own_ND.shape[1]] = own_ND
        return slots

    def redundancy(self, features: Readings, labels_N: Tensor) -> dict[str, Any] | None:
        """Redundancy in nats by the run's own w, on features that it was not trained on, and the calibration of w."""
        if len(self.compared) < 2 or self.discriminator is None:
            return None
        rows_N = some_of_each(labels_N, MOST_READ)
        slots = Features(self.slots(features.means_ND[:, rows_N]), self.slots(features.scales_ND[:, rows_N]))
        found = estimate(self.discriminator, slots, labels_N[rows_N], self.pairs_P2)
        if found is None:
            warn(
                f"{plural(len(labels_N), 'held-out input')}, none with another of its class: redundancy cannot be read"
            )
            return None
        return {"estimator": "own", "pairs": self.pairs_P2.tolist(), **asdict(found)}

    def fresh_redundancy(self) -> dict[str, Any] | None:
        """Redundancy by new discriminators, the same way for every run: learnt on training, read on test features."""
        splits = some_of(self.source.train), some_of(self.source.test)
        train = self.collect(splits[0], f"training {self.source.kind}, for the estimator", FEATURES)
        test = self.collect(splits[1], f"test {self.source.kind}, for the estimator", FEATURES)
        if train is None or test is None or len(self.members) < 2:
            return None
        learnt_from, read_on = (Features(found.means_ND, found.scales_ND) for found in (train, test))
        labels = splits[0].labels_N, splits[1].labels_N
        found = fresh_estimates(learnt_from, labels[0], read_on, labels[1], self.source.num_classes, self.stage)
        kinds = {kind: asdict(estimated) for kind, estimated in found.items()}
        if len(kinds) < 2:
            return None
        return {"pairs": list(combinations(self.members, 2)), **kinds}

    def independence(self, readings: Readings, logits_NK: Tensor) -> Tensor:
        assert self.discriminator is not None
        chunks = zip(self.slots(readings.means_ND).split(BATCH, 1), logits_NK.argmax(1).split(BATCH), strict=True)
        return torch.cat([self.discriminator.independence(m, y, self.pairs_P2) for m, y in chunks]).double()


def some_of(split: Split) -> Split:
    """What the estimates of redundancy read: rank 0 gathers its features, so it does not grow with the data."""
    return split if len(split) <= MOST_READ else part(split, some_of_each(split.labels_N, MOST_READ))


def measured(logits_MNK: Tensor, labels_N: Tensor, average: str, folds: int) -> dict[str, Any]:
    """All measures that need only logits and labels, for our ensembles or any other."""
    measures = metrics.measure(logits_MNK, labels_N, average, folds)
    log_p_NK = metrics.ensemble_log_probabilities(logits_MNK, average)
    temperature = measures["ensemble_tempered"]["temperature"] or 1.0
    tempered_NK = (metrics.ensemble_logits(logits_MNK, average).double() / temperature).log_softmax(1)
    right_N = log_p_NK.argmax(1) == labels_N
    member_right_MN = logits_MNK.argmax(2) == labels_N
    counts_K = labels_N.bincount(minlength=logits_MNK.shape[2]).double()
    return {
        **measures,
        "num_inputs": len(labels_N),
        "pairs": metrics.pairwise(logits_MNK.argmax(2), labels_N),
        "reliability": {
            "before": metrics.reliability(log_p_NK, labels_N),
            "after": metrics.reliability(tempered_NK, labels_N),
        },
        "risk_coverage": risk_coverage(logits_MNK, labels_N, log_p_NK),
        "per_class": {
            "count": counts_K.long().tolist(),
            "ensemble": per_class(right_N.double(), labels_N, counts_K),
            "members": per_class(member_right_MN.double().mean(0), labels_N, counts_K),
        },
    }


def risk_coverage(logits_MNK: Tensor, labels_N: Tensor, log_p_NK: Tensor) -> dict[str, Any]:
    """Curves of the ensemble, of its members on average, and of the most accurate member on these same inputs."""
    log_p_MNK = logits_MNK.double().log_softmax(2)
    members = [metrics.risk_coverage(of_member_NK, labels_N) for of_member_NK in log_p_MNK]
    best = max(range(len(members)), key=lambda member: metrics.accuracy(log_p_MNK[member], labels_N))
    columns = zip(*(curve["risk"] for curve in members), strict=True)
    ensemble = metrics.risk_coverage(log_p_NK, labels_N)
    return {
        "coverage": ensemble["coverage"],
        "ensemble": ensemble["risk"],
        "mean member": [fmean(risks) for risks in columns],
        "best member": members[best]["risk"],
    }


def union_of(outside: Mapping[str, Readings | None]) -> dict[str, Readings | None]:
    """The readings of the united sets as those of one more, if all of them are at hand."""
    found = [readings for name in UNITED if (readings := outside.get(name)) is not None]
    if len(found) < len(UNITED):
        return {}
    columns = zip(*((one.logits_NK, one.means_ND, one.scales_ND) for one in found), strict=True)
    return {UNION: Readings(*(torch.cat(column, 1) for column in columns))}


def per_class(values_N: Tensor, labels_N: Tensor, counts_K: Tensor) -> list[float | None]:
    sums_K = torch.bincount(labels_N, values_N, len(counts_K))
    return [float(total / count) if count else None for total, count in zip(sums_K, counts_K, strict=True)]


def gallery(logits_MNK: Tensor, split: Split, average: str) -> dict[str, Tensor]:
    """The inputs on which members disagree most, by the spread of their probabilities around their mean."""
    p_MNK = logits_MNK.softmax(2)
    disagreement_N = (p_MNK - p_MNK.mean(0)).square().sum(2).mean(0)
    chosen = disagreement_N.topk(min(GALLERY, len(disagreement_N))).indices
    return {
        "images": split.take(chosen),
        "labels": split.labels_N[chosen],
        "predictions": logits_MNK[:, chosen].argmax(2),
        "confidences": p_MNK[:, chosen].amax(2),
        "ensemble": metrics.ensemble_logits(logits_MNK[:, chosen], average).argmax(1),
    }
