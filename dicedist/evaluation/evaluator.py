"""Computes every measure of an ensemble whose members may be on any rank; the results go into a folder.

Legend: M members, N inputs, D features, K classes, P pairs of members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from dicedist.evaluation.detection import EVERY_SET, INDEPENDENCE, Lens, Scorer, Scores, detect
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.fusing import Fusing
from dicedist.evaluation.readings import Readings, inside, read_batches
from dicedist.evaluation.redundancy import estimate, fresh_estimates
from dicedist.metrics.features import Reference

BATCH = 500
GALLERY = 24
REFERENCE = 10_000  # training images, whose features OOD scores compare with
UNION = "tinyimagenet_lsun_isun"  # a row of the paper's tables: all images of these sets as one
UNITED = ("tinyimagenet_crop", "tinyimagenet_resize", "lsun_crop", "lsun_resize", "isun")
ESTIMATED = 10_000  # held-out inputs, between whose features the run's own w estimates redundancy
MOST_READ = 50_000  # inputs whose features new estimators learn from


@dataclass(frozen=True)
class Collected:
    """What the reporter has of all members on a split. Of their features only some rows stay."""

    logits_MNK: Tensor
    seen: Scores  # what a lens made of the features of every input
    features: Features  # of the rows that were asked for
    fused_NK: Tensor | None = None  # the logits of a fused classifier


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
        self,
        split: Split,
        noun: str,
        lens: Lens | None = None,
        keep_N: Tensor | None = None,
        wants_logits: bool = True,
        fuses: bool = False,
    ) -> Collected | None:
        """What all members make of a split, on the reporter, batch by batch; None elsewhere.

        lens: looks at the features of each batch. keep_N: the rows, in their order, whose features stay. fuses: also
        the logits of the fused classifier, if there is one.
        """
        progress, fusing = self.stage(len(split), noun), self.fusing if fuses else None
        batches, start = [], 0
        for own in read_batches(self.hosted, split, self.source, BATCH, self.device, progress, fusing):
            size = min(BATCH, len(split) - start)
            kept_X = None if keep_N is None else inside(keep_N, start, size)
            batches.append(self.collect_batch(own, size, lens, kept_X, wants_logits))
            start += size
        progress.clear()
        found = [batch for batch in batches if batch is not None]
        return replace(joined(found), fused_NK=fusing.take() if fusing else None) if found else None

    def collect_batch(
        self, own: Mapping[int, Readings], size: int, lens: Lens | None, keep_X: Tensor | None, wants_logits: bool
    ) -> Collected | None:
        classes = [self.source.num_classes] * len(self.members)
        logits_MBK = self.gathered(own, "logits_NK", size, classes if wants_logits else None)
        means_MBD = self.gathered(own, "means_ND", size, self.feature_dims if lens or keep_X is not None else None)
        scales_MBD = self.gathered(own, "scales_ND", size, None if keep_X is None else self.feature_dims)
        if logits_MBK is None or means_MBD is None or scales_MBD is None:
            return None
        kept = torch.arange(0) if keep_X is None else keep_X  # no slice, which would keep the whole batch in memory
        return Collected(
            logits_MBK,
            {} if lens is None else lens(logits_MBK, means_MBD),
            Features(means_MBD[:, kept], scales_MBD[:, kept]),
        )

    def gathered(
        self, own: Mapping[int, Readings], name: str, size: int, widths: Sequence[int] | None
    ) -> Tensor | None:
        """One column of every member, the narrower filled up with zeros. widths: None if the column is not wanted."""
        if widths is None:
            return torch.empty(len(self.members), size, 0) if self.control.reports else None
        places = {member: place for place, member in enumerate(self.members)}
        mine = {places[member]: getattr(readings, name) for member, readings in own.items()}
        received = self.control.collect(mine, [(size, width) for width in widths], self.hosts)
        if received is None:
            return None
        return torch.stack([torch.nn.functional.pad(row, (0, max(widths) - row.shape[1])) for row in received])

    def evaluate(
        self, config: EvaluateConfig, ood: OodConfig, targets: CalibrationConfig, data_root: str | None
    ) -> Findings | None:
        """Measures the test set, the redundancy of held-out features and the OOD sets; chooses the thresholds."""
        average, val = config.average, self.source.val
        images, missing = load_ood(ood.sets, self.source, data_root)
        labels_N = self.source.test.labels_N
        held_out_labels_N = val.labels_N if len(val) else labels_N
        rows_N = some_of_each(held_out_labels_N, ESTIMATED)
        lens = self.lens(average, self.reference() if images else None)
        kept_N = None if len(val) else rows_N
        test = self.collect(self.source.test, f"test {self.source.kind}", lens, kept_N, fuses=True)
        held_out = self.collect(val, f"validation {self.source.kind}", lens, rows_N) if len(val) else test
        fresh = self.fresh_redundancy() if self.fresh else None
        outside = {
            name: self.collect(
                Split(pixels, torch.zeros(len(pixels), dtype=torch.int64)), f"{self.source.kind} of {name}", lens
            )
            for name, pixels in images.items()
        }
        if test is None or held_out is None:
            return None
        outside |= union_of(outside)
        result: dict[str, Any] = {
            "step": self.step,
            "member_ids": list(self.members),
            "average": average,
            "class_names": self.source.class_names,
            **measured(test.logits_MNK, labels_N, average, config.folds),
            "redundancy": self.redundancy(held_out.features, held_out_labels_N[rows_N]),
            "ood_missing": missing,
        }
        if fresh is not None:
            result["redundancy_fresh"] = fresh
        tensors = {"logits": test.logits_MNK, "labels": labels_N}
        score = self.scorer(test, average, result["ensemble_tempered"]["temperature"] or 1.0)
        found = {name: collected for name, collected in outside.items() if collected is not None}
        groups = ood.groups or {EVERY_SET: list(images)}
        scores = {name: score(collected.logits_MNK, collected.seen) for name, collected in found.items()}
        result |= detect(score(test.logits_MNK, test.seen), scores, groups)
        tensors |= {f"ood.{name}": collected.logits_MNK for name, collected in found.items() if name != UNION}
        if len(val) or targets.source == "test":
            chosen_on = (test, labels_N) if targets.source == "test" else (held_out, held_out_labels_N)
            result["calibration"], kept = self.calibrate(*chosen_on, test, average, targets, score)
            tensors |= kept
        if test.fused_NK is not None:
            result["fused"] = metrics.measure(test.fused_NK[None], labels_N, average, config.folds)["ensemble"]
            tensors["fused"] = test.fused_NK
        if self.student in self.members:
            result["student"] = result["members"]["per_member"][self.members.index(self.student)]
        shown = gallery(test.logits_MNK, self.source.test, average) if self.source.kind == "images" else {}
        return Findings(result, tensors, shown)

    def calibrate(
        self,
        held_out: Collected,
        labels_N: Tensor,
        test: Collected,
        average: str,
        config: CalibrationConfig,
        score: Scorer,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For evaluation.json; and what it was chosen from, so that other members or targets can be calibrated too."""
        scores_N, test_scores_N = (score.used(each.logits_MNK, each.seen) for each in (held_out, test))
        fitted = calibration.fit(held_out.logits_MNK, labels_N, average, config, scores_N)
        came_to = calibration.tested(fitted, test.logits_MNK, self.source.test.labels_N, average, test_scores_N)
        kept = {
            calibration.LOGITS: held_out.logits_MNK.clone(),  # perhaps those of the test set
            calibration.LABELS: labels_N.clone(),
            calibration.SCORES: scores_N,
        }
        return {**asdict(fitted), "test": came_to}, kept

    def lens(self, average: str, reference: Reference | None) -> Lens:
        knows = self.discriminator is not None and len(self.compared) > 1
        return Lens(average, self.independence if knows else None, reference)

    def independence(self, means_MBD: Tensor, labels_B: Tensor) -> Tensor:
        assert self.discriminator is not None
        return self.discriminator.independence(self.slots(means_MBD), labels_B, self.pairs_P2).double()

    def scorer(self, test: Collected, average: str, temperature: float) -> Scorer:
        """Temperatures of scores follow the paper's protocol on test, as its tables do."""
        if INDEPENDENCE not in test.seen:
            return Scorer(average, temperature)
        scaled_NK = metrics.ensemble_logits(test.logits_MNK, average) * test.seen[INDEPENDENCE][:, None]
        own = metrics.split_half(scaled_NK, self.source.test.labels_N, {})["temperature"] or 1.0
        return Scorer(average, temperature, own)

    def reference(self) -> Reference | None:
        """Features of training images, of every class as many as possible: what KNN and Mahalanobis compare with."""
        rows_N = some_of_each(self.source.train.labels_N, REFERENCE)
        found = self.features(part(self.source.train, rows_N), f"training {self.source.kind}, for OOD scores")
        labels_N = self.source.train.labels_N[rows_N]
        return None if found is None else Reference.of(found.means_MBD, labels_N, self.source.num_classes)

    def features(self, split: Split, noun: str) -> Features | None:
        """Of a split that was made small: rank 0 gathers them."""
        found = self.collect(split, noun, keep_N=torch.arange(len(split)), wants_logits=False)
        return None if found is None else found.features

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

    def redundancy(self, features: Features, labels_N: Tensor) -> dict[str, Any] | None:
        """Redundancy in nats by the run's own w, on features that it was not trained on, and the calibration of w."""
        if len(self.compared) < 2 or self.discriminator is None:
            return None
        slots = Features(self.slots(features.means_MBD), self.slots(features.scales_MBD))
        found = estimate(self.discriminator, slots, labels_N, self.pairs_P2)
        if found is None:
            warn(
                f"{plural(len(labels_N), 'held-out input')}, none with another of its class: redundancy cannot be read"
            )
            return None
        return {"estimator": "own", "pairs": self.pairs_P2.tolist(), **asdict(found)}

    def fresh_redundancy(self) -> dict[str, Any] | None:
        """Redundancy by new discriminators, the same way for every run: learnt on training, read on test features."""
        splits = some_of(self.source.train), some_of(self.source.test)
        train = self.features(splits[0], f"training {self.source.kind}, for the estimator")
        test = self.features(splits[1], f"test {self.source.kind}, for the estimator")
        if train is None or test is None or len(self.members) < 2:
            return None
        labels = splits[0].labels_N, splits[1].labels_N
        found = fresh_estimates(train, labels[0], test, labels[1], self.source.num_classes, self.stage)
        kinds = {kind: asdict(estimated) for kind, estimated in found.items()}
        if len(kinds) < 2:
            return None
        return {"pairs": list(combinations(self.members, 2)), **kinds}


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


def joined(batches: Sequence[Collected]) -> Collected:
    """Batches of a split, or splits, as one."""
    return Collected(
        torch.cat([batch.logits_MNK for batch in batches], 1),
        {name: torch.cat([batch.seen[name] for batch in batches]) for name in batches[0].seen},
        Features(
            torch.cat([batch.features.means_MBD for batch in batches], 1),
            torch.cat([batch.features.scales_MBD for batch in batches], 1),
        ),
    )


def union_of(outside: Mapping[str, Collected | None]) -> dict[str, Collected | None]:
    """What was collected of the united sets as that of one more, if all of them are at hand."""
    found = [collected for name in UNITED if (collected := outside.get(name)) is not None]
    return {UNION: joined(found)} if len(found) == len(UNITED) else {}


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
