"""The redundancy loss for your own distributed loop: the trainer's messages over a plain process group.

Legend: M members, B inputs, D features.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dicedist.algorithm.conditional_redundancy import ConditionalRedundancy, WithGradient
from dicedist.algorithm.member import to_float32
from dicedist.algorithm.messages import Answers, Traffic
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import place

ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64


class DistributedRedundancy(nn.Module):
    """`ConditionalRedundancy` over the ranks of torch's default process group, each of which hosts some members.

        redundancy = DistributedRedundancy(num_members=4, feature_dim=64, num_classes=100, delta=0.2)
        members = {number: Member() for number in redundancy.members}                      # members of this rank
        loss = own_losses + redundancy(means, scales, labels)                              # dicts by number
        loss.backward(); optimizer.step()
        redundancy.learn()

    Every rank creates this module, and in every step calls it and `learn`, with the same labels. All members see the
    same inputs. With M + 1 ranks, each member and the discriminator w have a rank each; with fewer, they share ranks.
    A single process without a group hosts everything. Means and scales go to the rank of w, gradients of the means come
    back, as point-to-point messages over NCCL or gloo. Neither a configuration nor torchrun is needed.

    scales=False is for deterministic members. The other settings are those of `ConditionalRedundancy`. `own` is this
    object on the rank of w, and None elsewhere. `state_dict` holds everything on the rank of w, and is empty on other
    ranks. Repeated calls before `learn`, `torch.no_grad` and autocast work as there; all ranks must do the same.

    Examples:
        >>> redundancy = DistributedRedundancy(num_members=2, feature_dim=8, num_classes=3, delta=0.1)
        >>> redundancy.members, redundancy.own is None  # without a process group
        ([0, 1], False)
        >>> means = {number: torch.randn(12, 8, requires_grad=True) for number in redundancy.members}
        >>> redundancy(means, {number: torch.ones(12, 8) for number in means}, torch.arange(12) % 3).backward()
        >>> means[1].grad.shape
        torch.Size([12, 8])
        >>> sorted(redundancy.learn())[:2]
        ['discriminator/accuracy', 'discriminator/loss']
    """

    def __init__(
        self,
        num_members: int,
        feature_dim: int,
        num_classes: int,
        delta: float = 0.1,
        *,
        device: torch.device | str = "cpu",
        scales: bool = True,
        **settings: Any,
    ) -> None:
        """Create the groups, so all ranks call this. device: this rank's device, which receives messages."""
        super().__init__()
        grouped = dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        if ranks > num_members + 1:
            raise ValueError(
                f"{ranks} ranks are too many for {num_members} members and a discriminator: start {num_members + 1}"
            )
        own = ConditionalRedundancy(num_members, feature_dim, num_classes, delta, **settings)  # checks the settings
        placement = place(ranks, num_members, needs_discriminator=True)
        numbers, widths = range(num_members), [feature_dim] * num_members
        traffic = Traffic(
            widths={"mean": widths, "scale": widths},
            received={(one, other): () for one in numbers for other in numbers},
            features=("mean", "scale") if scales else ("mean",),
            compared=numbers,
        )
        self.exchange = Exchange(placement, rank, torch.device(device), traffic)
        self.members = placement.members_on(rank)
        self.own = own.to(device) if rank == placement.discriminator else None
        self.out_of_step_M = torch.zeros(num_members, dtype=torch.int64, device=device)

    def forward(
        self,
        means: Mapping[int, Tensor],
        scales: Mapping[int, Tensor] | None,
        labels: Tensor,
        ramp_up: float = 1.0,
        covariance: float = 1.0,
        where: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return a scalar with the gradient of the redundancy in the means of this rank's members.

        means, scales: by member number. All ranks call this together. The value is the whole loss on the rank of w, and
        0 elsewhere.
        """
        fields = {number: self.fields(number, means, scales, len(labels)) for number in self.members}
        gathered = self.exchange.gather(fields, len(labels), checksum(labels))
        self.out_of_step_M |= gathered.out_of_step_M
        value, answers, learns = torch.zeros((), device=labels.device), None, torch.is_grad_enabled()
        if self.own is not None:
            read = {name: gathered.stacked(name, self.exchange.compared) for name in self.exchange.features}
            given = read["mean"], read.get("scale"), labels, ramp_up, covariance, where
            if learns:
                answers = Answers({"mean": self.own.gradients(*given)})
            value = self.own.loss if learns else self.own.read(*given)
        if not learns:
            return value
        mine = self.exchange.scatter(answers, len(labels))
        if not self.members:
            return value
        own_MBD = torch.stack([means[number] for number in self.members])
        gradients_MBD = torch.stack([mine[number].gradients["mean"] for number in self.members])
        loss = WithGradient.apply(own_MBD, value, gradients_MBD)
        assert isinstance(loss, Tensor)
        return loss

    def learn(self) -> dict[str, Tensor]:
        """Train w on the batch of the last call; do nothing on ranks without w."""
        return self.own.learn() if self.own is not None else {}

    def check(self) -> None:
        """Raise a ValueError on the rank of w if a member has seen other labels than w since the last check.

        The check waits for the device: once an epoch is often enough.
        """
        apart = self.out_of_step_M.nonzero().flatten().tolist()
        self.out_of_step_M.zero_()
        if apart:
            raise ValueError(f"members {apart} saw other batches than the discriminator: give all ranks the same ones")

    def fields(
        self, number: int, means: Mapping[int, Tensor], scales: Mapping[int, Tensor] | None, batch: int
    ) -> dict[str, Tensor]:
        """Check and return a member's fields: the receiver would only notice that the message is too short."""
        sent: dict[str, Tensor] = {}
        for name, given in (("mean", means), ("scale", scales)):
            if name not in self.exchange.features:
                continue
            value = None if given is None else given.get(number)
            wanted = (batch, self.exchange.widths[name][number])
            if value is None or tuple(value.shape) != wanted:
                shape = "missing" if value is None else list(value.shape)
                raise ValueError(f"the {name}s of member {number} are {shape}: give {list(wanted)} on this rank")
            sent[name] = to_float32(value.detach())
        return sent


def checksum(labels_B: Tensor) -> Tensor:
    """Return int64 [1], which depends on every label and its place; it stays on the device."""
    places_B = (2 * torch.arange(len(labels_B), device=labels_B.device) + 1) * ODD
    return ((labels_B + 1) * places_B).sum()[None]
