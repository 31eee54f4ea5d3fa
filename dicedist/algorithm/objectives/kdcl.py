"""Knowledge distillation via collaborative learning (Guo et al., 2020): the best combination of members is the teacher.

loss_i = CE_i + weight r KD(z_i <- z_t), with the teacher z_t held constant. The authors published no code; third-party
descriptions agree on these definitions. Teachers:

naive      per input, the logits of the member with the lowest cross-entropy
minlogit   z_t[k] = min_i (z_i[k] - z_i[y]): its cross-entropy is never above the best member's
general    z_t = sum_i w_i z_i, w = C^-1 1 / (1^T C^-1 1), C_ij the mean product of the errors p_i - onehot(y) and
           p_j - onehot(y) on the held-out images; updated after every epoch, 1/M before the first

Legend: M members, B inputs, N held-out inputs, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import View, WeighingTerm
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import Config

TEACHERS = ("naive", "minlogit", "general")


class Weights(nn.Module):
    weights_M: Tensor

    def __init__(self, num_members: int):
        super().__init__()
        self.register_buffer("weights_M", torch.full((num_members,), 1 / num_members))


class Term(Distillation, WeighingTerm):
    sends = ("logits",)
    mixes = False  # its teachers are chosen by the label

    def __init__(self, temperature: float, teacher: str = "minlogit", weight: float = 1.0, ramp_up: bool = True):
        """ramp_up: the distillation grows with the ramp-up, as in the DICE paper; the KDCL paper has no ramp-up."""
        super().__init__(temperature)
        if teacher not in TEACHERS:
            raise ValueError(f"method.terms.kdcl.teacher={teacher}: write one of {', '.join(TEACHERS)}")
        self.teacher, self.weight = teacher, weight
        self.follows = ("ramp_up",) if ramp_up else ()

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        if self.teacher != "general":
            return
        for given, what, instead in (
            (config.data.split == "full", "on held-out images", "data.split=holdout"),
            (config.evaluate.every_epochs != 1, "after every epoch", "evaluate.every_epochs=1"),
        ):
            if given:
                raise ValueError(f"method={config.method.name} weighs members {what}: write {instead}")

    def shared(self, networks: Sequence[Network], num_classes: int) -> dict[str, nn.Module]:
        return {"weights": Weights(len(networks))} if self.teacher == "general" else {}

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        logits_MBK = view.rows("logits").detach()
        if self.teacher == "naive":
            teacher_BK = naive(logits_MBK, view.labels_B)
        elif self.teacher == "minlogit":
            teacher_BK = minlogit(logits_MBK, view.labels_B)
        else:
            assert view.shared is not None
            teacher_BK = torch.einsum("m,mbk->bk", view.shared["weights"].weights_M, logits_MBK)
        weight = self.weight * (now.ramp_up if self.follows else 1.0)
        return {"distillation": weight * self.distil(view.own.logits_BK, teacher_BK)}

    def weigh(self, logits_MNK: Tensor, labels_N: Tensor) -> list[float] | None:
        return general_weights(logits_MNK, labels_N).tolist() if self.teacher == "general" else None

    def take_weights(self, weights: Sequence[float], shared: nn.ModuleDict) -> None:
        held = shared["weights"].get_buffer("weights_M")
        held.copy_(torch.tensor(weights, dtype=held.dtype))


def naive(logits_MBK: Tensor, labels_B: Tensor) -> Tensor:
    losses_MB = F.cross_entropy(logits_MBK.flatten(0, 1), labels_B.repeat(len(logits_MBK)), reduction="none").view(
        logits_MBK.shape[:2]
    )
    return logits_MBK[losses_MB.argmin(0), torch.arange(len(labels_B), device=labels_B.device)]


def minlogit(logits_MBK: Tensor, labels_B: Tensor) -> Tensor:
    of_label_MB1 = logits_MBK.gather(2, labels_B[None, :, None].expand(len(logits_MBK), -1, 1))
    return (logits_MBK - of_label_MB1).amin(0)


def general_weights(logits_MNK: Tensor, labels_N: Tensor) -> Tensor:
    """Return weights that sum to 1 and minimize the squared error of the weighted mean; some may be negative."""
    errors_MNK = logits_MNK.double().softmax(2) - F.one_hot(labels_N, logits_MNK.shape[2])
    return least_error_weights(torch.einsum("ink,jnk->ij", errors_MNK, errors_MNK) / len(labels_N))


def least_error_weights(products_MM: Tensor) -> Tensor:
    """Solve for the weights. Equal members make the matrix singular; a small diagonal then gives equal weights."""
    num_members = len(products_MM)
    ridge = 1e-6 * products_MM.trace() / num_members
    ones_M = torch.ones(num_members, dtype=products_MM.dtype)
    solved_M = torch.linalg.solve(products_MM + ridge * torch.eye(num_members, dtype=products_MM.dtype), ones_M)
    return solved_M / solved_M.sum()
