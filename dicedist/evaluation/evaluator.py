"""Compute every measure of an ensemble whose members may be on any rank.

Legend: M members, N inputs, B inputs of a batch, D features, K classes, P pairs of members, X rows whose features stay.
w is the discriminator of the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dicedist import metrics
from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.config.schema import CalibrationConfig, OodConfig
from dicedist.console.lines import plural, warn
from dicedist.data.ood import load_ood
from dicedist.data.sources import Split, part, some_of_each
from dicedist.evaluation import calibration
from dicedist.evaluation.detection import EVERY_SET, OwnScore, Scorer, detect
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.readings import FIELDS, LOGITS, Collected, Reader, joined
from dicedist.evaluation.redundancy import DRAWS, estimate, fresh_estimates
from dicedist.metrics.features import MOST_IN_BANK, Reference, bank_of, bank_size
from dicedist.metrics.ood_scores import available

GALLERY = 24
REFERENCE = 10_000  # training images whose features are the reference of OOD scores
UNION = "tinyimagenet_lsun_isun"  # a row of the paper's tables: the images of these three sets together
UNITED = ("tinyimagenet_crop", "tinyimagenet_resize", "lsun_crop", "lsun_resize", "isun")
ESTIMATED = 10_000  # held-out inputs on which the run's own w estimates redundancy
MOST_READ = 50_000  # inputs that new estimators learn from


@dataclass(frozen=True)
class EverythingRead:
    """The readings of all members for one evaluation, on rank 0."""

    scorer: Scorer
    test: Collected
    held_out: Collected  # the validation inputs; the test inputs if there are none
    rows_X: Tensor  # the rows of held_out whose features are kept
    outside: dict[str, Collected]  # by OOD set
    missing: list[str]  # OOD sets that were not found, with the reasons
    fresh: dict[str, Any] | None  # redundancy by new estimators


@dataclass
class Evaluator(Reader):
    """Reads and measures an ensemble. Without w and student, no run is needed."""

    w: Discriminator | None = None  # of the run, on rank 0; compares all members of the run except a student
    student: int | None = None  # the member that the method trains to be used alone
    chosen: calibration.Calibration | None = None  # an earlier calibration: nothing is chosen on validation inputs
    ood_scores: Mapping[str, OwnScore] = field(default_factory=dict)  # the user's own scores, for the tables

    def evaluate(
        self, folds: int, ood: OodConfig, targets: CalibrationConfig, data_root: str | None, fresh: bool = False
    ) -> Findings | None:
        """Measure the test set, the redundancy of held-out features and the OOD sets, and calibrate.

        fresh: also estimate redundancy by new estimators, which takes minutes.
        """
        read = self.read_everything(ood, data_root, fresh)
        return None if read is None else self.summarize(read, folds, ood.groups, targets)

    def read_everything(self, ood: OodConfig, data_root: str | None, fresh: bool) -> EverythingRead | None:
        """Read the training features, the test set, the held-out inputs and the OOD sets. All ranks call this."""
        source, has_val = self.source, len(self.source.val) > 0
        images, missing = load_ood(ood.sets, source, data_root)
        independence = None if self.ensemble.w is None else self.independence
        known = self.training_features(with_classes=bool(images))
        scorer = Scorer(self.about.average, independence, *known, self.ood_scores)
        rows_X = some_of_each((source.val if has_val else source.test).labels_N, ESTIMATED)
        columns, score = (LOGITS, FIELDS) if self.about.fusion else (LOGITS,), scorer.feature_scores
        test = self.collect(source.test, f"test {source.kind}", columns, score, None if has_val else rows_X)
        held_out = test
        if has_val:
            held_out = self.collect(source.val, f"validation {source.kind}", (LOGITS,), score, rows_X)
        estimated = self.fresh_redundancy() if fresh else None
        outside = {}
        for name, pixels in images.items():
            split = Split(pixels, torch.zeros(len(pixels), dtype=torch.int64))
            if (found := self.collect(split, f"{source.kind} of {name}", (LOGITS,), score)) is not None:
                outside[name] = found
        if test is None or held_out is None:
            return None
        return EverythingRead(scorer, test, held_out, rows_X, outside, missing, estimated)

    def summarize(
        self, read: EverythingRead, folds: int, groups: Mapping[str, Sequence[str]], targets: CalibrationConfig
    ) -> Findings:
        """Measure everything that was read. Only rank 0 calls this."""
        test, outside, rows_X = read.test, read.outside, read.rows_X
        findings = self.measure(test, folds)
        result = findings.result
        score = read.scorer.fitted(test, result["ensemble_tempered"]["temperature"] or 1.0)
        result["redundancy"] = self.redundancy(read.held_out.features, read.held_out.labels_N[rows_X])
        if result["redundancy"] is None and self.w is not None and self.about.compared:
            warn(f"{plural(len(rows_X), 'held-out input')}, none with another of its class: redundancy cannot be read")
        result["ood_missing"] = read.missing
        if read.fresh is not None:
            result["redundancy_fresh"] = read.fresh
        scores = {name: score(found) for name, found in {**outside, **union_of(outside)}.items()}
        result |= detect(score(test), scores, groups or {EVERY_SET: list(outside)})
        findings.tensors |= {f"ood.{name}": found.logits_MNK for name, found in outside.items()}
        if read.scorer.bank_RMD is not None:
            findings.tensors[calibration.BANK] = read.scorer.bank_RMD
        self.add_calibration(findings, read, targets)
        self.add_fused_and_student(findings, test, folds)
        return findings

    def measure(self, test: Collected, folds: int) -> Findings:
        """Measure everything that needs only logits and labels."""
        average, split = self.about.average, self.source.test
        result = {
            "step": self.about.step,
            "member_ids": list(self.about.members),
            "average": average,
            "class_names": self.source.class_names,
            **metrics.full_measures(test.logits_MNK, test.labels_N, average, folds),
        }
        shown = gallery(test.logits_MNK, split, average) if self.source.kind == "images" else {}
        return Findings(result, {"logits": test.logits_MNK, "labels": test.labels_N}, shown)

    def add_fused_and_student(self, findings: Findings, test: Collected, folds: int) -> None:
        """Measure a classifier or a member that the method trains to be used instead of the ensemble."""
        result, members = findings.result, self.about.members
        if test.fused_NK is not None:
            fused = metrics.measure(test.fused_NK[None], test.labels_N, self.about.average, folds)
            result["fused"], findings.tensors["fused"] = fused["ensemble"], test.fused_NK
        if self.student in members:
            result["student"] = result["members"]["per_member"][members.index(self.student)]

    def add_calibration(self, findings: Findings, read: EverythingRead, targets: CalibrationConfig) -> None:
        """Calibrate on held-out inputs, unless that was done before, and measure the choices on the test set.

        The readings of the held-out inputs are saved for later calibrations.
        """
        average, test = self.about.average, read.test
        held_out, chosen = test if targets.source == "test" else read.held_out, self.chosen
        if chosen is None:
            if not len(self.source.val) and targets.source != "test":
                return
            chosen = self.calibrate(held_out, targets)
            kept = held_out.feature_scores
            findings.tensors |= calibration.kept(held_out.logits_MNK, held_out.labels_N, kept)
        came_to = calibration.tested(chosen, test.logits_MNK, test.labels_N, average, test.feature_scores)
        findings.result["calibration"] = {**asdict(chosen), "test": came_to}

    def calibrate(self, held_out: Collected, targets: CalibrationConfig) -> calibration.Calibration:
        """Choose temperature, label sets and thresholds. A score that these members lack is replaced by another."""
        default_score = available(targets.ood_score, held_out.feature_scores)
        if default_score != targets.ood_score:
            warn(
                f"calibration.ood_score={targets.ood_score}: these members lack this score, so {default_score} is used"
            )
        targets = replace(targets, ood_score=default_score)
        logits_MNK, labels_N = held_out.logits_MNK, held_out.labels_N
        return calibration.fit(logits_MNK, labels_N, self.about.average, targets, held_out.feature_scores)

    def independence(self, means_MBD: Tensor, labels_B: Tensor) -> Tensor:
        device = self.ensemble.device
        return self.ensemble.independence([*means_MBD.to(device)], labels_B.to(device)).cpu().double()

    def training_features(self, with_classes: bool) -> tuple[Tensor | None, Reference | None]:
        """Read training inputs, balanced over classes. Return the bank for KNN and the class statistics, on rank 0.

        with_classes: for Mahalanobis distances, which need more inputs. An ensemble that has a bank keeps it.
        """
        own_RMD = None if self.ensemble.bank_RMD is None else self.ensemble.bank_RMD.cpu()
        if not len(self.source.train):
            return own_RMD, None
        train = some_of(self.source.train, REFERENCE if with_classes else MOST_IN_BANK)
        found = self.features(train, f"training {self.source.kind}, for OOD scores")
        if found is None:
            return None, None
        size = bank_size(len(found.means_MBD), found.means_MBD.shape[2])
        bank_RMD = bank_of(found.means_MBD[:, some_of_each(train.labels_N, size)])
        classes = Reference.of(found.means_MBD, train.labels_N, self.source.num_classes) if with_classes else None
        return bank_RMD if own_RMD is None else own_RMD, classes

    def redundancy(self, features: Features, labels_N: Tensor, num_draws: int = DRAWS) -> dict[str, Any] | None:
        """Estimate redundancy in nats with the run's own w, on features that w was not trained on; add w's calibration.

        None without w, or if no input has a partner of its class. Computed on the device of this rank's members.
        """
        compared = [self.about.members[place] for place in self.about.compared]
        if self.w is None or not compared:
            return None
        device = self.ensemble.device
        both = (self.slots(values, compared).to(device) for values in (features.means_MBD, features.scales_MBD))
        pairs = [list(pair) for pair in combinations(compared, 2)]
        pairs_P2, w = torch.tensor(pairs).to(device), self.w.to(device)
        found = estimate(w, Features(*both), labels_N.to(device), pairs_P2, num_draws)
        return None if found is None else {"estimator": "own", "pairs": pairs, **asdict(found)}

    def slots(self, values_MND: Tensor, compared: Sequence[int]) -> Tensor:
        """Return the compared members at their numbers in the run; the other members are zero."""
        assert self.w is not None
        width = self.w.network.slots_MDH.shape[1]  # a student may have more features than w reads
        slots = torch.zeros(self.w.num_members, values_MND.shape[1], width)
        slots[list(compared)] = pad(values_MND[self.about.compared], (0, width - values_MND.shape[2]))
        return slots

    def fresh_redundancy(self) -> dict[str, Any] | None:
        """Estimate redundancy with new estimators, which are trained and read in the same way for every run."""
        train, test = (some_of(split, MOST_READ) for split in (self.source.train, self.source.test))
        trained = self.features(train, f"training {self.source.kind}, for the estimator")
        read = self.features(test, f"test {self.source.kind}, for the estimator")
        if trained is None or read is None or len(self.about.members) < 2:
            return None
        samples = (trained, train.labels_N), (read, test.labels_N)
        found = fresh_estimates(*samples, self.source.num_classes, self.stage)
        if len(found) < 2:
            return None
        return {
            "pairs": list(combinations(self.about.members, 2)),
            **{kind: asdict(estimated) for kind, estimated in found.items()},
        }


def some_of(split: Split, most: int) -> Split:
    """Take at most `most` inputs, balanced over classes, so that rank 0 can hold their features."""
    return split if len(split) <= most else part(split, some_of_each(split.labels_N, most))


def union_of(outside: Mapping[str, Collected]) -> dict[str, Collected]:
    """Return the sets of UNION as one more set, if all of them were read."""
    found = [outside[name] for name in UNITED if name in outside]
    return {UNION: joined(found)} if len(found) == len(UNITED) else {}


def gallery(logits_MNK: Tensor, split: Split, average: str) -> dict[str, Tensor]:
    """Return the inputs on which members disagree most, by the spread of their probabilities around their mean."""
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
