"""On-the-fly native ensemble (Lan et al., 2018): a gate mixes the members' logits into their teacher.

sum CE_i + CE(z_e) + r sum KD(z_i <- z_e), z_e = sum_i g_i z_i, with the teacher held constant and the gate
g = softmax(ReLU(BN(Linear(pooled output of the trunk, M)))). Row i of the gate serves member i alone, so member i
computes its own gate and sends the result, one float per input. In branches all rows read the shared trunk: this is
ONE's gate. ONE has no nets; here row i reads the trunk of net i.

Legend: M members, B inputs, C channels, K classes.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.member import to_float32
from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.probes import TrunkOutput
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import Config


class Gate(nn.Module):
    """The gate. Batch norm keeps no running statistics, because only training uses the gate."""

    def __init__(self, trunk_dim: int, num_members: int):
        super().__init__()
        self.linear = nn.Linear(trunk_dim, num_members)
        self.norm = nn.BatchNorm1d(num_members, track_running_stats=False)

    def forward(self, pooled_BC: Tensor, member: int) -> Tensor:
        row = slice(member, member + 1)
        opened_B1 = F.linear(pooled_BC, self.linear.weight[row], self.linear.bias[row])
        # Normalized by hand, because torch's batch norm rejects a batch of one, with which an epoch may end.
        centered_B1 = opened_B1 - opened_B1.mean(0)
        normalized_B1 = centered_B1 * (centered_B1.square().mean(0) + self.norm.eps).rsqrt()
        return F.relu(normalized_B1 * self.norm.weight[row] + self.norm.bias[row])


class Term(Distillation):
    follows = ("ramp_up",)
    sends = ("logits", "gate")
    probes = (TrunkOutput,)

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        widths = {network.trunk_dim for network in networks}
        if len(widths) > 1:
            raise ValueError(
                f"the gate needs trunks of one width, not {sorted(widths)}: leave out network.per_member, or "
                "name networks of one family"
            )

    def shared(self, networks: Sequence[Network], num_classes: int) -> dict[str, nn.Module]:
        return {"gate": Gate(networks[0].trunk_dim, len(networks))}

    def fields(self, view: View) -> Fields:
        trunk = view.own.probed["trunk"]
        assert view.shared is not None
        pooled_BC = trunk if trunk.dim() == 2 else trunk.mean((2, 3))
        return {"gate": view.shared["gate"](to_float32(pooled_BC), view.index)}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {"gate": [1] * len(sizes)}

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        ensemble_BK = gated(view.rows("gate"), view.rows("logits"))
        return {
            "ensemble_cross_entropy": view.targets.cross_entropy(ensemble_BK),
            "distillation": now.ramp_up * self.distil(view.own.logits_BK, ensemble_BK.detach()),
        }


def gated(gates_MB1: Tensor, logits_MBK: Tensor) -> Tensor:
    """Return z_e, the members' logits weighted by the softmax of their gates."""
    return (gates_MB1.softmax(0) * logits_MBK).sum(0)
