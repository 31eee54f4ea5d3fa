"""Computes every measure of an ensemble whose members may be on any rank; the results go into a folder.

Legend: M members, N inputs, D features, K classes, P pairs of members.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.algorithm.adversary import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.parts import Hosted
from dicedist.cluster.control import Control
from dicedist.config.schema import EvaluateConfig, OodConfig
from dicedist.console.lines import plural, warn
from dicedist.console.progress import Stage, silent
from dicedist.data.ood import load_ood
from dicedist.data.sources import Source, Split
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.readings import Readings, read
from dicedist.evaluation.redundancy import estimate, fresh_estimates

BATCH = 500
GALLERY = 24
HISTOGRAM = 20


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

    def collect(self, split: Split, noun: str) -> Readings | None:
        """All members' logits [M, N, K], means and scales [M, N, D] for a split, on the reporter."""
        progress = self.stage(len(split), noun)
        own = read(self.hosted, split, self.source, BATCH, self.device, progress)
        progress.clear()
        places = {member: place for place, member in enumerate(self.members)}
        columns = []
        for name, widths in (
            ("logits_NK", [self.source.num_classes] * len(self.members)),
            ("means_ND", self.feature_dims),
            ("scales_ND", self.feature_dims),
        ):
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
        return Readings(logits_MNK, means_MND, scales_MND)

    def evaluate(self, config: EvaluateConfig, ood: OodConfig, data_root: str | None) -> Findings | None:
        """Measures the test set, the redundancy of held-out features and the OOD sets."""
        average = config.average
        images, missing = load_ood(ood.sets, self.source, data_root)
        test = self.collect(self.source.test, "test images")
        held_out = self.source.val if len(self.source.val) else self.source.test
        redundancy = self.redundancy(held_out)
        fresh = self.fresh_redundancy() if self.fresh else None
        outside = {
            name: self.collect(Split(pixels, torch.zeros(len(pixels), dtype=torch.int64)), f"images of {name}")
            for name, pixels in images.items()
        }
        if test is None:
            return None
        labels_N = self.source.test.labels_N
        result: dict[str, Any] = {
            "step": self.step,
            "member_ids": list(self.members),
            "average": average,
            "class_names": self.source.class_names,
            **measured(test.logits_NK, labels_N, average, config.folds),
            "redundancy": redundancy,
            "ood": {},
            "ood_missing": missing,
        }
        if fresh is not None:
            result["redundancy_fresh"] = fresh
        temperature = result["ensemble_tempered"]["temperature"] or 1.0
        tensors = {"logits": test.logits_NK, "labels": labels_N}
        for name, readings in outside.items():
            assert readings is not None
            result["ood"][name] = self.detect(test, readings, average, temperature)
            tensors[f"ood.{name}"] = readings.logits_NK
        if self.student in self.members:
            result["student"] = result["members"]["per_member"][self.members.index(self.student)]
        return Findings(result, tensors, gallery(test.logits_NK, self.source.test, average))

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

    def redundancy(self, held_out: Split) -> dict[str, Any] | None:
        """Redundancy in nats by the run's own w, on features that it was not trained on, and the calibration of w."""
        if len(self.compared) < 2 or not self.control.agree(self.discriminator is not None):
            return None
        features = self.collect(held_out, "held-out images")
        if features is None or self.discriminator is None:
            return None
        slots = Features(self.slots(features.means_ND), self.slots(features.scales_ND))
        found = estimate(self.discriminator, slots, held_out.labels_N, self.pairs_P2)
        if found is None:
            warn(
                f"{plural(len(held_out), 'held-out image')}, none with another of its class: redundancy cannot be read"
            )
            return None
        return {"estimator": "own", "pairs": self.pairs_P2.tolist(), **asdict(found)}

    def fresh_redundancy(self) -> dict[str, Any] | None:
        """Redundancy by new discriminators, the same way for every run: learnt on training, read on test features."""
        train = self.collect(self.source.train, "training images, for the estimator")
        test = self.collect(self.source.test, "test images, for the estimator")
        if train is None or test is None or len(self.members) < 2:
            return None
        learnt_from, read_on = (Features(found.means_ND, found.scales_ND) for found in (train, test))
        labels = self.source.train.labels_N, self.source.test.labels_N
        found = fresh_estimates(learnt_from, labels[0], read_on, labels[1], self.source.num_classes, self.stage)
        kinds = {kind: asdict(estimated) for kind, estimated in found.items()}
        if len(kinds) < 2:
            return None
        return {"pairs": list(combinations(self.members, 2)), **kinds}

    def detect(self, inside: Readings, outside: Readings, average: str, temperature: float) -> dict[str, Any]:
        """OOD measures of every score, in-distribution being positive; scores of w only if there is a w."""
        logits = [metrics.ensemble_logits(readings.logits_NK, average) for readings in (inside, outside)]
        scores = {
            "max_softmax": [metrics.confidence(x) for x in logits],
            "max_softmax_tempered": [metrics.confidence(x / temperature) for x in logits],
        }
        if self.discriminator is not None and len(self.compared) > 1:
            shares = [self.independence(readings, x) for readings, x in zip((inside, outside), logits, strict=True)]
            scaled = [x * share[:, None] for x, share in zip(logits, shares, strict=True)]
            labels_N = self.source.test.labels_N
            own_temperature = metrics.split_half(scaled[0], labels_N, {})["temperature"] or 1.0
            scores["w_only"] = shares
            scores["dice_x_w"] = [metrics.confidence(x) for x in scaled]
            scores["dice_x_w_tempered"] = [metrics.confidence(x / own_temperature) for x in scaled]
        return {
            name: {**metrics.ood(inside_N, outside_N), "histogram": [histogram(inside_N), histogram(outside_N)]}
            for name, (inside_N, outside_N) in scores.items()
        }

    def independence(self, readings: Readings, logits_NK: Tensor) -> Tensor:
        assert self.discriminator is not None
        chunks = zip(self.slots(readings.means_ND).split(BATCH, 1), logits_NK.argmax(1).split(BATCH), strict=True)
        return torch.cat([self.discriminator.independence(m, y, self.pairs_P2) for m, y in chunks]).double()


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
        "per_class": {
            "count": counts_K.long().tolist(),
            "ensemble": per_class(right_N.double(), labels_N, counts_K),
            "members": per_class(member_right_MN.double().mean(0), labels_N, counts_K),
        },
    }


def per_class(values_N: Tensor, labels_N: Tensor, counts_K: Tensor) -> list[float | None]:
    sums_K = torch.bincount(labels_N, values_N, len(counts_K))
    return [float(total / count) if count else None for total, count in zip(sums_K, counts_K, strict=True)]


def histogram(scores_N: Tensor) -> list[float]:
    """The share of scores in each equal bin of 0..1."""
    return (torch.histc(scores_N.float(), HISTOGRAM, 0, 1) / len(scores_N)).tolist()


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
