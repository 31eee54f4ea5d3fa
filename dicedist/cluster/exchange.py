"""The messages of a step between the ranks that host its parts.

One step, with the discriminator w on its own rank (members on the rank of w hand over their tensors without a message):

    member 0  --- mean, scale, checksum --->            --- d loss / d mean --->  member 0
    member 1  --- mean, scale, checksum --->  rank of w --- d loss / d mean --->  member 1
    ...                       gather                          scatter              ...

If several ranks divide w (redundancy.ranks), each gathers all features and answers for its own pairs, and a member adds
up the answers. In every learning step these ranks sum the gradients of w.

A fusion in the place of w reads maps and logits, and answers its logits and the gradients of the maps.
Methods that work on predictions send logits (and a gate, queries, keys) in the same gather, to the ranks of the members
that receive them. Independent methods send nothing. Each message goes directly from one rank to another (grouped send
and receive, which NCCL and gloo both have), so a rank receives only what it needs. Each replica of a member sends the
rows of the batch that it saw. w receives all rows; a receiving replica only gets the rows of its own inputs.

Legend: M members, B inputs, D features, K classes.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dicedist.algorithm.batch import share
from dicedist.algorithm.counterpart import Division
from dicedist.algorithm.messages import Answers, Fields, Gathered, Traffic
from dicedist.algorithm.networks.batch_norm import SyncBatchNorm, synchronize
from dicedist.algorithm.spans import span
from dicedist.cluster.heartbeat import between_ranks
from dicedist.cluster.placement import Placement

Routes = Mapping[tuple[int, int, int], tuple[str, ...]]  # (receiving rank, member, replica on another rank) -> fields

# Messages in flight belong to the process, as its group does: a message dropped with its exchange would never arrive,
# and its receiver would wait forever.
SENDING: list[tuple[dist.Work, Tensor]] = []


class Exchange:
    """The messages of this rank. In a single process every host is this rank, so nothing is ever sent."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        device: torch.device,
        traffic: Traffic,
        wire: torch.dtype | None = None,
        timeout: timedelta | None = None,
    ):
        """Build the exchange of this rank. All ranks call this, because it creates the groups of ranks with members.

        wire: the dtype of messages; None: torch's default float. timeout: of these groups, which do not inherit the
        default group's timeout; None: torch's own.
        """
        self.placement, self.rank, self.device, self.wire = placement, rank, device, wire
        self.widths, self.features, self.compared = traffic.widths, traffic.features, traffic.compared
        self.gradients, self.outputs = traffic.gradients, traffic.outputs
        self.routes = routes(placement, traffic)
        self.member_group = group_of(placement.member_ranks, timeout)
        self.replica_group = replica_group(placement, timeout)  # the ranks of the member hosted here
        self.w_group = group_of(placement.discriminators, timeout)  # the ranks that divide w

    @property
    def num_members(self) -> int:
        return self.placement.num_members

    @property
    def replicas(self) -> int:
        return self.placement.replicas

    @span("gather")
    def gather(self, own: Mapping[int, Fields], size: int, mark: Tensor) -> Gathered:
        """Send the fields of the members hosted here, and receive the fields of this rank's routes.

        size: of the whole batch. mark: the batch's checksum, int64 [1], which every rank computes and compares with the
        senders' checksums.
        """
        self.finish_sending()
        placement, sends, receives = self.placement, [], {}
        mine = placement.replica_on(self.rank)
        packed: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        for (receiver, member, replica), names in self.routes.items():
            if member in own and replica == mine:
                if (member, names) not in packed:
                    packed[member, names] = self.pack([own[member][name] for name in names], mark)
                sends.append((receiver, packed[member, names]))
            elif receiver == self.rank:
                floats = self.checksum_floats + self.floats(member, replica, names, size)
                receives[member, replica] = torch.empty(floats, dtype=self.dtype, device=self.device)
        self.transfer(sends, [(placement.hosts[member][at], message) for (member, at), message in receives.items()])
        gathered = {member: {name: self.rounded(value) for name, value in own[member].items()} for member in own}
        out_of_step_M = torch.zeros(placement.num_members, dtype=torch.int64, device=self.device)
        received: dict[int, list[Fields]] = {}
        for (member, replica), message in receives.items():
            received.setdefault(member, []).append(self.unpack(message, member, replica, size))
            out_of_step_M[member] |= (message[: self.checksum_floats].view(torch.int64) != mark)[0]
        for member, rows in received.items():
            whole = {name: torch.cat([fields[name] for fields in rows]) for name in rows[0]} if rows[1:] else rows[0]
            gathered[member] = whole
        return Gathered(gathered, out_of_step_M)

    @span("scatter")
    def scatter(self, answers: Answers | None, size: int) -> dict[int, Answers]:
        """Send the answers of w, on its ranks, to all compared members. Return the answers to the members hosted here.

        Answers of several ranks of w are summed.
        """
        names, given = self.answers, {**answers.gradients, **answers.outputs} if answers else {}
        packed: dict[int, list[Tensor]] = {}
        sends, receives = [], []
        for source in self.placement.discriminators:
            for place, member in enumerate(self.compared):
                for replica, host in enumerate(self.placement.hosts[member]):
                    rows = share(size, self.placement.replicas, replica)
                    if source == self.rank:
                        own = [given[name][place, rows, : self.widths[name][member]] for name in names]
                        message = torch.cat([answer.flatten() for answer in own]).to(self.dtype)
                        if host == self.rank:
                            packed.setdefault(member, []).append(message)
                        else:
                            sends.append((host, message))
                    elif host == self.rank:
                        floats = self.floats(member, replica, names, size)
                        message = torch.empty(floats, dtype=self.dtype, device=self.device)
                        packed.setdefault(member, []).append(message)
                        receives.append((source, message))
        self.transfer(sends, receives)
        mine = self.placement.replica_on(self.rank)
        usual = torch.get_default_dtype()
        totals = {
            member: sum((m.to(usual) for m in rest), first.to(usual)) for member, (first, *rest) in packed.items()
        }
        found = {member: self.split(total, names, member, mine, size) for member, total in totals.items()}
        return {
            member: Answers(*({name: own[name] for name in kind} for kind in (self.gradients, self.outputs)))
            for member, own in found.items()
        }

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the names of all fields that w answers, in the order of a message."""
        return self.gradients + self.outputs

    @property
    def division(self) -> Division:
        """Return this rank's share of w, on a rank with w."""
        ranks = self.placement.discriminators
        return Division(ranks.index(self.rank), len(ranks), partial(sum_gradients, group=self.w_group))

    def transfer(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        """Post all messages at once and wait for the incoming ones; the next gather waits for the outgoing ones."""
        if not sends and not receives:
            return
        messages = [message for _, message in sends + receives]
        operations = [dist.P2POp(dist.isend, message, to) for to, message in sends]
        operations += [dist.P2POp(dist.irecv, message, source) for source, message in receives]
        with between_ranks():
            works = dist.batch_isend_irecv(operations)
        if len(works) != len(messages):  # NCCL returns one work for all; waiting for it orders streams, not the host
            return self.wait(works)
        SENDING.extend(zip(works[: len(sends)], messages[: len(sends)], strict=True))
        self.wait(works[len(sends) :])

    def finish_sending(self) -> None:
        """Wait for all messages that this process has posted, by this exchange or an earlier one."""
        self.wait([work for work, _ in SENDING])
        SENDING.clear()

    @span("wait")
    def wait(self, works: Sequence[dist.Work]) -> None:
        with between_ranks():
            for work in works:
                work.wait()

    def floats(self, member: int, replica: int, names: Sequence[str], size: int) -> int:
        rows = share(size, self.placement.replicas, replica)
        return (rows.stop - rows.start) * sum(self.widths[name][member] for name in names)

    def unpack(self, message: Tensor, member: int, replica: int, size: int) -> Fields:
        values = message[self.checksum_floats :].to(torch.get_default_dtype())
        return self.split(values, self.routes[self.rank, member, replica], member, replica, size)

    def split(self, message: Tensor, names: Sequence[str], member: int, replica: int, size: int) -> Fields:
        values = message.split([self.floats(member, replica, [name], size) for name in names])
        return {name: value.view(-1, self.widths[name][member]) for name, value in zip(names, values, strict=True)}

    def replicated(self, module: nn.Module) -> nn.Module:
        """Average a member's gradients over its ranks while backward runs. All ranks of a member call this."""
        if self.replica_group is None:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        with between_ranks():
            return DistributedDataParallel(
                module,
                device_ids=devices,
                process_group=self.replica_group,
                broadcast_buffers=False,  # only the first replica's buffers are ever read
                gradient_as_bucket_view=True,
            )

    def synchronize(self, module: nn.Module, frozen: Collection[str]) -> None:
        """Normalize a member's batch norms over the whole batch, on a GPU with torch's. All its ranks call this."""
        if self.device.type == "cuda":
            synchronize(module, lambda norm: nn.SyncBatchNorm.convert_sync_batchnorm(norm, self.replica_group), frozen)
        else:
            synchronize(module, lambda norm: SyncBatchNorm(norm, self.sum_over_replicas), frozen)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Return the differentiable sum over the ranks of a member. They call this in forward, and meet in backward."""
        return SumOverRanks.apply(values, self.replica_group)

    def sum_over_members(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks with members, without gradients. All of them call this."""
        if self.member_group is None:
            return values
        return summed(values, self.member_group) / self.placement.replicas

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients of shared parameters over members, average over replicas. All ranks with members call this."""
        if not parameters:
            return
        sum_gradients(parameters, self.member_group, self.placement.replicas)

    def bytes_per_step(self, size: int, num_common: int = 0, num_own: int = 0, num_w: int = 0) -> dict[str, int]:
        """Return the bytes that all ranks together send in one step with a batch of this size, by kind.

        Each number counts parameters whose gradients ranks sum, as in a ring. num_common: shared parameters, summed
        over ranks with members. num_own: all members' own parameters, summed over replicas. num_w: the parameters of w
        times its learning steps, summed over the ranks that divide w.
        """
        placement = self.placement
        features, predictions = (
            sum(
                self.floats(member, replica, [name for name in names if (name in self.features) == of_w], size)
                for (_, member, replica), names in self.routes.items()
            )
            for of_w in (True, False)
        )
        floats = {
            "features": features,
            "gradients": sum(
                self.floats(member, replica, self.answers, size)
                for source in placement.discriminators
                for member in self.compared
                for replica, host in enumerate(placement.hosts[member])
                if host != source
            ),
            "predictions": predictions,
            "checksums": self.checksum_floats * len(self.routes),
        }
        sums = {
            "shared gradients": 2 * (len(placement.member_ranks) - 1) * num_common,
            "gradients of replicas": 2 * (placement.replicas - 1) * num_own,
            "gradients of w": 2 * (len(placement.discriminators) - 1) * num_w,
        }
        sent = [(self.dtype, floats), (torch.get_default_dtype(), sums)]
        return {name: dtype.itemsize * count for dtype, of in sent for name, count in of.items() if count > 0}

    @property
    def dtype(self) -> torch.dtype:
        return self.wire or torch.get_default_dtype()

    @property
    def checksum_floats(self) -> int:
        """Return the length of an int64 checksum in numbers of the message's dtype."""
        return torch.int64.itemsize // self.dtype.itemsize

    def rounded(self, value: Tensor) -> Tensor:
        """Round a tensor as a message to another rank would."""
        return value.detach() if self.wire is None else value.detach().to(self.wire).to(torch.get_default_dtype())

    def pack(self, values: Sequence[Tensor], mark: Tensor) -> Tensor:
        """Return one flat message, which begins with the bits of the checksum."""
        return torch.cat([mark.view(self.dtype)] + [value.detach().to(self.dtype).flatten() for value in values])


def routes(placement: Placement, traffic: Traffic) -> Routes:
    """Return the fields that each rank receives from each member: for w, and for the members on this rank."""
    found = {}
    for rank in range(placement.world_size):
        for member, hosts in enumerate(placement.hosts):
            reads = rank in placement.discriminators and member in traffic.compared
            received = [traffic.received[receiver, member] for receiver in placement.members_on(rank)]
            for replica, host in enumerate(hosts):
                same_rows = received if replica == placement.replica_on(rank) else []
                names = dict.fromkeys(n for fields in [traffic.features if reads else (), *same_rows] for n in fields)
                if names and rank != host:
                    found[rank, member, replica] = tuple(names)
    return found


def group_of(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Create a group. None for a group of one rank, and on ranks outside the group. All ranks call this."""
    with between_ranks():
        group = dist.new_group(list(ranks), timeout) if len(ranks) > 1 else None
    return group if isinstance(group, dist.ProcessGroup) else None


def replica_group(placement: Placement, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Return the group of the member whose replica this rank hosts. All ranks call this."""
    groups = [group_of(hosts, timeout) for hosts in placement.hosts] if placement.replicas > 1 else []
    return next((group for group in groups if group is not None), None)


class SumOverRanks(torch.autograd.Function):
    """Sum values over the ranks of a group; backward sums the gradients over these ranks."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return summed(values, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, context.group), None


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, divisor: int = 1) -> None:
    """Replace gradients by their sum over the group, divided. All its ranks call this; None is a group of one rank."""
    if group is None:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with between_ranks():
        dist.all_reduce(flat, group=group)
    flat /= divisor
    totals = flat.split([gradient.numel() for gradient in gradients])
    for parameter, gradient, total in zip(parameters, gradients, totals, strict=True):
        # Into the old tensor: a fused optimizer needs it in the memory format of the weights (channels_last).
        parameter.grad = gradient.copy_(total.view_as(gradient))


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone()
    with between_ranks():
        dist.all_reduce(total, group=group)
    return total
