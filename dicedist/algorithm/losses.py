"""Losses of an ensemble in one process, as functions of the members' outputs: for your own training loop.

Each loss is a scalar, summed over members and averaged over inputs. Its gradient in a member's tensors equals the
gradient that the trainer gives that member. docs/methods.md has the equations. ConditionalRedundancy is the redundancy
loss.

Legend: M members, B inputs, D features, K classes, A and C peers.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.objectives import adp as _adp
from dicedist.algorithm.objectives._distillation import distil
from dicedist.algorithm.objectives.dml import mutual
from dicedist.algorithm.objectives.okddip import attended
from dicedist.algorithm.objectives.one import gated
from dicedist.algorithm.objectives.vceb import gaussian_divergence

__all__ = ["adp", "cl_ilr", "cross_entropy", "dml", "okddip", "one", "vceb", "vib"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Independent members: logits [M, B, K].

    Examples:
        >>> cross_entropy(torch.zeros(3, 8, 2), torch.zeros(8, dtype=torch.int64))  # 3 log 2
        tensor(2.0794)
    """
    logits_MBK = stacked("logits", logits, labels)
    return torch.stack([F.cross_entropy(logits_BK, labels) for logits_BK in logits_MBK]).sum()


def vceb(logits: Tensor, labels: Tensor, means: Tensor, scales: Tensor, priors: Tensor, beta: float) -> Tensor:
    """Variational conditional entropy bottleneck: cross-entropy and the divergence from the class's prior over beta.

    logits [M, B, K] of one sample of z, means and scales [M, B, D] of its encoder, priors [M, K, D]: the mean b(y) of
    the backward encoder, which each member learns for each class.

    Examples:
        >>> zeros, ones = torch.zeros(2, 8, 4), torch.ones(2, 8, 4)
        >>> labels = torch.zeros(8, dtype=torch.int64)
        >>> vceb(torch.zeros(2, 8, 3), labels, zeros, ones, torch.ones(2, 3, 4), beta=2.0) - 2 * torch.tensor(3.0).log()
        tensor(2.)
    """
    refuse_unfit(means, scales, priors, (len(means), logits.shape[-1]), beta)
    prior_MBD = priors[:, labels]
    return cross_entropy(logits, labels) + compression(means, scales, prior_MBD) / beta


def vib(logits: Tensor, labels: Tensor, means: Tensor, scales: Tensor, priors: Tensor, beta: float) -> Tensor:
    """Variational information bottleneck: `vceb` with one prior for all classes, priors [M, 1, D].

    The trainer's beta for VIB is its beta for VCEB plus 1.

    Examples:
        >>> zeros, ones = torch.zeros(2, 8, 4), torch.ones(2, 8, 4)
        >>> labels = torch.zeros(8, dtype=torch.int64)
        >>> vib(torch.zeros(2, 8, 3), labels, zeros, ones, torch.ones(2, 1, 4), beta=4.0) - 2 * torch.tensor(3.0).log()
        tensor(1.)
    """
    refuse_unfit(means, scales, priors, (len(means), 1), beta)
    return cross_entropy(logits, labels) + compression(means, scales, priors) / beta


def compression(means_MBD: Tensor, scales_MBD: Tensor, prior_MBD: Tensor) -> Tensor:
    return gaussian_divergence(means_MBD, scales_MBD, prior_MBD).mean(-1).sum()


def adp(logits: Tensor, labels: Tensor, alpha: float, beta: float) -> Tensor:
    """Adaptive diversity promoting, to be added to the cross-entropy: logits [M, B, K].

    Examples:
        >>> adp(torch.zeros(2, 8, 3), torch.zeros(8, dtype=torch.int64), alpha=1.0, beta=0.0)  # -log 3
        tensor(-1.0986)
    """
    logits_MBK = stacked("logits", logits, labels)
    volume = _adp.log_volume(logits_MBK, labels).mean().to(logits_MBK.dtype)
    return -alpha * _adp.entropy(logits_MBK).mean() - beta * volume


def dml(logits: Tensor) -> Tensor:
    """Deep mutual learning, to be added to the cross-entropy: each member fits every other, held constant.

    Examples:
        >>> dml(torch.zeros(2, 8, 3))
        tensor(0.)
    """
    refuse_alone(logits)
    own_and_others = zip(logits, others_of(logits.detach()), strict=True)
    return torch.stack([mutual(own_BK, peers_PBK) for own_BK, peers_PBK in own_and_others]).sum()


def cl_ilr(logits: Tensor, temperature: float) -> Tensor:
    """Collaborative learning, to be added to the cross-entropy: each member fits the others' mean, held constant.

    Where branches leave a shared trunk, divide its gradient by M.

    Examples:
        >>> cl_ilr(torch.zeros(3, 8, 3), temperature=3.0)
        tensor(0.)
    """
    refuse_alone(logits)
    refuse_temperature(temperature)
    own_and_others = zip(logits, others_of(logits.detach()), strict=True)
    return torch.stack([distil(own_BK, peers.mean(0), temperature) for own_BK, peers in own_and_others]).sum()


def one(logits: Tensor, labels: Tensor, gates: Tensor, temperature: float) -> Tensor:
    """On-the-fly native ensemble, to be added to the cross-entropy: gates [M, B, 1] before their softmax over members.

    Examples:
        >>> one(torch.zeros(2, 8, 3), torch.zeros(8, dtype=torch.int64), torch.zeros(2, 8, 1), temperature=3.0)  # log 3
        tensor(1.0986)
    """
    logits_MBK = stacked("logits", logits, labels)
    refuse_temperature(temperature)
    teacher_BK = gated(gates, logits_MBK)
    distilled = distil(logits_MBK, teacher_BK.detach().expand_as(logits_MBK), temperature)
    return F.cross_entropy(teacher_BK, labels) + distilled


def okddip(logits: Tensor, queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Distillation with diverse peers, to be added to the cross-entropy: the last of logits [M, B, K] is the student.

    queries and keys [M - 1, B, width]: of the attention among the peers.

    Examples:
        >>> okddip(torch.zeros(3, 8, 3), torch.zeros(2, 8, 2), torch.zeros(2, 8, 2), temperature=3.0)
        tensor(0.)
    """
    refuse_temperature(temperature)
    peers_ABK, student_BK = logits[:-1], logits[-1]
    among = distil(peers_ABK, attended(peers_ABK, queries, keys), temperature)
    return among + distil(student_BK, peers_ABK.mean(0), temperature)


def others_of(logits_MBK: Tensor) -> list[Tensor]:
    """Return for each member the rows of all others."""
    return [torch.cat([logits_MBK[:m], logits_MBK[m + 1 :]]) for m in range(len(logits_MBK))]


def refuse_alone(logits_MBK: Tensor) -> None:
    if logits_MBK.ndim != 3 or len(logits_MBK) < 2:
        raise ValueError(
            f"logits have shape {list(logits_MBK.shape)}: give [members, inputs, classes] with at least 2 members"
        )


def refuse_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: write a number above 0")


def refuse_unfit(means: Tensor, scales: Tensor, priors: Tensor, rows: tuple[int, int], beta: float) -> None:
    """Check the tensors of a bottleneck. rows: the number of members, and of prior means of each member."""
    if scales.shape != means.shape:
        raise ValueError(f"scales have shape {list(scales.shape)}, and means {list(means.shape)}")
    if tuple(priors.shape) != (*rows, means.shape[-1]):
        raise ValueError(f"priors have shape {list(priors.shape)}: give {[*rows, means.shape[-1]]}")
    if not beta > 0:
        raise ValueError(f"beta={beta}: write a number above 0")


def refuse_labels(labels_B: Tensor, batch: int, num_classes: int) -> None:
    """Check the labels. Their range is checked only on a CPU, where reading it needs no synchronization."""
    if not isinstance(labels_B, Tensor):
        raise ValueError(f"labels are a {type(labels_B).__name__}: give a tensor, torch.int64 [{batch}]")
    if labels_B.shape != (batch,) or labels_B.dtype != torch.int64:
        raise ValueError(f"labels are {labels_B.dtype} {list(labels_B.shape)}: give torch.int64 [{batch}]")
    if labels_B.device.type == "cpu" and batch and not (labels_B.min() >= 0 and labels_B.max() < num_classes):
        low, high = labels_B.min().item(), labels_B.max().item()
        raise ValueError(
            f"labels lie in {low}..{high}, but there are {num_classes} classes: give 0 to {num_classes - 1}"
        )


def stacked(name: str, values: Tensor, labels_B: Tensor) -> Tensor:
    if values.ndim != 3 or values.shape[1] != len(labels_B):
        raise ValueError(f"{name} have shape {list(values.shape)}: give [members, {len(labels_B)}, classes]")
    refuse_labels(labels_B, values.shape[1], values.shape[2])
    return values
