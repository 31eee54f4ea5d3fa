"""The predictions of an ensemble: classes, and the confidence of the ensemble and its members.

Legend: M members, N inputs, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dicedist import metrics
from dicedist.evaluation.about import About

REASONS = (None, "unsure", "unlike the training images")  # why an ensemble abstains, by `Prediction.reason`
PER_INPUT = ("confidence", "disagreement", "entropy", "mutual_information", "ood_score")


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answers for N inputs, as tensors on the CPU.

    labels          [N]        the class with the largest probability
    probabilities   [N, K]     of the ensemble, before temperature
    member_logits   [M, N, K]
    confidence      [N]        the largest probability after temperature scaling
    disagreement    [N]        the share of pairs of members that predict different classes
    entropy         [N]        in nats: the total uncertainty of the probabilities, from 0 to log K (uniform)
    mutual_information [N]     in nats: the part of the uncertainty that comes from disagreement of members: the entropy
                               of their mean probabilities minus the mean of their entropies
    member_labels   [N, M]     the class that each member predicts
    ood_score       [N]        low for inputs unlike the training inputs

    If the ensemble was calibrated on held-out images, otherwise None:
    label_set       [N, K]     true for the classes of a set that holds the true class with probability 1 - alpha
    abstain         [N]        true if the ensemble should not decide
    reason          [N]        0: answered, 1: unsure, 2: unlike the training images
    ood_threshold   [N]        of the OOD score

    If the method trains a fused classifier (ffl, pcl), otherwise None; all fields above describe the members' mean:
    fused_label     [N]        the class that the fused classifier predicts
    fused_probabilities [N, K] not calibrated

    paths                      the files, in the order of the rows; None if some inputs were not files
    left_out                   files of a folder that could not be read, with the reasons

    Examples:
        >>> answers = ensemble.predict(images)  # an ensemble of three members, four images
        >>> answers
        Prediction(4 inputs, 3 members, 2 classes)
        >>> answers.probabilities.shape, answers.member_probabilities.shape, answers.entropy.shape
        (torch.Size([4, 2]), torch.Size([3, 4, 2]), torch.Size([4]))
        >>> sorted(answers.rows()[0])[:3]
        ['confidence', 'disagreement', 'entropy']
    """

    about: About
    labels: Tensor
    probabilities: Tensor
    member_logits: Tensor
    confidence: Tensor
    disagreement: Tensor
    entropy: Tensor
    mutual_information: Tensor
    member_labels: Tensor
    ood_score: Tensor
    label_set: Tensor | None = None
    abstain: Tensor | None = None
    reason: Tensor | None = None
    ood_threshold: Tensor | None = None
    fused_label: Tensor | None = None
    fused_probabilities: Tensor | None = None
    paths: list[str] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        about: About,
        batches: Sequence[Mapping[str, Tensor]],
        paths: list[str] | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> "Prediction":
        """Join the outputs of the ensemble's forward for all batches."""
        joined = {name: torch.cat([batch[name].cpu() for batch in batches]) for name in batches[0]}
        labels, member_logits = joined.pop("label"), joined.pop("member_logits").transpose(0, 1)
        return cls(about, labels, member_logits=member_logits, **joined, paths=paths, left_out=left_out or {})

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        inputs, members = f"{len(self):,} inputs", f"{len(self.about.members)} members"
        return f"Prediction({inputs}, {members}, {len(self.class_names)} classes)"

    @property
    def class_names(self) -> list[str]:
        return self.about.class_names

    @property
    def names(self) -> list[str]:
        """Return the name of each input's class."""
        return [self.class_names[label] for label in self.labels.tolist()]

    @property
    def member_probabilities(self) -> Tensor:
        """Return the probabilities [M, N, K] of each member."""
        return self.member_logits.softmax(-1)

    @property
    def calibrated(self) -> Tensor:
        """Return the probabilities [N, K] after temperature scaling; the largest of a row is the confidence."""
        logits_NK = metrics.ensemble_logits(self.member_logits, self.about.average)
        return (logits_NK / self.about.temperature).softmax(-1).float()

    @property
    def sets(self) -> list[list[str]] | None:
        """Return each input's label set, which holds the true label with probability 1 - alpha; best label first."""
        if self.label_set is None:
            return None
        order_NK = self.probabilities.argsort(dim=1, descending=True)
        inside_NK = self.label_set.gather(1, order_NK)
        rows = zip(order_NK.tolist(), inside_NK.tolist(), strict=True)
        return [[self.class_names[k] for k, inside in zip(*row, strict=True) if inside] for row in rows]

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each input, ready for pandas.DataFrame or JSON.

        The probabilities and the confidence, which is the largest of them, are after temperature scaling.
        """
        columns: dict[str, Sequence[Any]] = {} if self.paths is None else {"path": self.paths}
        columns["label"] = self.names
        columns |= {name: getattr(self, name).tolist() for name in PER_INPUT}
        if self.ood_threshold is not None:
            columns["ood_threshold"] = self.ood_threshold.tolist()
        columns["members"] = [[self.class_names[k] for k in labels] for labels in self.member_labels.tolist()]
        if self.fused_label is not None:
            columns["fused_label"] = [self.class_names[label] for label in self.fused_label.tolist()]
        if self.reason is not None:
            columns["abstains"] = [REASONS[reason] for reason in self.reason.tolist()]
        if self.sets is not None:
            columns["set"] = self.sets
        columns["probabilities"] = [dict(zip(self.class_names, row, strict=True)) for row in self.calibrated.tolist()]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
