"""Distillation of a trained ensemble: members learn the teacher's predictions for their own training inputs.

The teacher's members t = 1..T predict p_t = softmax(z_t / tau) for the same crops, flips and mixtures; the student
predicts q = softmax(s / tau). With `labels` = 0 only the teacher counts:

mean       loss = (1 - labels) tau^2 KL(mean_t p_t || q) + labels CE(s, y)          (Hinton et al., 2015)
members    loss = (1 - labels) tau^2 KL(p_i || q_i) + labels CE(s_i, y), where student i learns from the teacher's
           member i: branches of one trunk keep what members disagree about (Hydra, Tran et al., 2020)

A single student gains nothing from the distribution of the teacher's members: mean_t KL(p_t || q) is
KL(mean_t p_t || q) plus the mutual information of the teacher, which q does not change. Hence the branches.

Legend: B inputs, T members of the teacher, K classes.
"""

import math
from collections.abc import Mapping, Sized

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.batch import Views
from dicedist.algorithm.member import Encoding, to_float32
from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.probes import Probe
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import Config

TARGETS = ("mean", "members")


class TeacherLogits(Probe):
    """The teacher's logits [B, T, K] for the images of each member, as `probed["teacher"]`."""

    def __init__(self, term: Objective, hosted: Hosted, num_members: int, teacher: nn.Module | None):
        super().__init__(term, hosted, num_members, teacher)
        assert isinstance(term, Term)
        taught = len(teacher) if isinstance(teacher, Sized) else num_members
        if term.target == "members" and taught != num_members:
            raise ValueError(
                f"method.terms.distill.target=members: the teacher has {taught} members, so write "
                f"ensemble.size={taught}"
            )

    @classmethod
    def check(cls, config: Config) -> None:
        if config.teacher.run is None:
            raise ValueError(
                f"method={config.method.name} learns from the ensemble of a run: write teacher.run=runs/NAME, or "
                "`dicedist distill run=runs/NAME network=NAME`"
            )

    def on_encodings(self, encodings: Mapping[int, Encoding], images: Views) -> None:
        assert self.teacher is not None
        teacher = self.teacher
        logits = images.map(lambda view: to_float32(teacher(view)))
        for member, own in encodings.items():
            own.probed["teacher"] = logits[member]


class Term(Objective):
    probes = (TeacherLogits,)
    mixes = True  # the teacher sees the mixed inputs

    def __init__(self, temperature: float = 1.0, labels: float = 0.0, target: str = "mean"):
        if not 0 < temperature < math.inf:
            raise ValueError(f"method.terms.distill.temperature={temperature}: write a number above 0")
        if not 0 <= labels < 1:
            raise ValueError(f"method.terms.distill.labels={labels}: write a number from 0 and below 1")
        if target not in TARGETS:
            raise ValueError(f"method.terms.distill.target={target}: write one of {', '.join(TARGETS)}")
        self.temperature, self.labels, self.target = temperature, labels, target

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        log_p_BTK = (view.own.probed["teacher"] / self.temperature).log_softmax(-1)
        log_p_BK = log_p_BTK[:, view.index] if self.target == "members" else log_mean(log_p_BTK)
        log_q_BK = (view.own.logits_BK / self.temperature).log_softmax(-1)
        divergence = F.kl_div(log_q_BK, log_p_BK, reduction="batchmean", log_target=True)
        parts = {"distillation": (1 - self.labels) * self.temperature**2 * divergence}
        if self.labels:
            parts["cross_entropy"] = self.labels * view.targets.cross_entropy(view.own.logits_BK)
        return parts


def log_mean(log_p_BTK: Tensor) -> Tensor:
    """Return the logarithm of the mean probabilities."""
    return torch.logsumexp(log_p_BTK, dim=1) - math.log(log_p_BTK.shape[1])
