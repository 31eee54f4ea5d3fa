"""Every message between ranks; the only caller of collectives.

One step, with the discriminator w on a rank of its own (a member beside w sends nothing, its tensors are handed over):

    member 0  --- mean, scale, checksum --->            --- d loss / d mean --->  member 0
    member 1  --- mean, scale, checksum --->  rank of w --- d loss / d mean --->  member 1
    ...                       gather                          scatter              ...

Methods on predictions send logits (and a gate, queries, keys) to the ranks that host their listeners instead, in the
same gather; independent ones send nothing. A message goes from one rank straight to another (grouped send and receive,
which NCCL and gloo both have): a rank never receives what it does not need.

Legend: M members, B inputs, D features, K classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dicedist.objectives import Fields, Method
from dicedist.placement import Placement
from dicedist.world import World

FEATURES = ("mean", "scale")  # the fields that w reads


@dataclass
class Gathered:
    """What reached this rank: by member, the fields sent; and who was out of step (1) or not (0)."""

    fields: dict[int, Fields]
    out_of_step_M: Tensor

    def stacked(self, name: str, members: Sequence[int]) -> Tensor:
        """[members, B, the largest width], those with fewer features filled up with zeros."""
        rows = [self.fields[member][name] for member in members]
        width = max(row.shape[-1] for row in rows)
        return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows])


@dataclass
class Exchange:
    """The messages of this rank. In a single process every host is this rank, so nothing is ever sent."""

    placement: Placement
    rank: int
    device: torch.device
    widths: Mapping[str, Sequence[int]]  # by field, floats per input for each member
    routes: Mapping[tuple[int, int], tuple[str, ...]]  # (rank, member that lives elsewhere) -> fields that it receives
    compared: Sequence[int]  # the members whose features w reads
    member_group: dist.ProcessGroup | None = None
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def gather(self, own: Mapping[int, Fields], batch: int, mark: Tensor) -> Gathered:
        """Hosts of members call with their members' fields; each rank receives those of its routes.

        mark: the batch's checksum, int64 [1], which every rank computes for itself and compares with the senders'.
        """
        self.finish_sending()
        sends, receives = [], {}
        packed: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        for (receiver, member), names in self.routes.items():
            if member in own:
                if (member, names) not in packed:
                    packed[member, names] = pack([own[member][name] for name in names], mark)
                sends.append((receiver, packed[member, names]))
            elif receiver == self.rank:
                receives[member] = torch.empty(
                    checksum_floats() + self.floats(member, names, batch), device=self.device
                )
        self.transfer(sends, [(self.placement.host_of[member], message) for member, message in receives.items()])
        gathered = {member: {name: value.detach() for name, value in fields.items()} for member, fields in own.items()}
        out_of_step_M = torch.zeros(self.placement.num_members, dtype=torch.int64, device=self.device)
        for member, message in receives.items():
            gathered[member] = self.unpack(message, member, self.routes[self.rank, member], batch)
            out_of_step_M[member] = (message[: checksum_floats()].view(torch.int64) != mark)[0]
        return Gathered(gathered, out_of_step_M)

    def scatter(self, gradients_MBD: Tensor | None, batch: int) -> dict[int, Tensor]:
        """The rank of w calls with a gradient for each compared member; hosts receive their own members' [B, D]."""
        source = self.placement.discriminator
        if source is None:
            return {}
        widths, own, sends, receives = self.widths["mean"], {}, [], []
        for place, member in enumerate(self.compared):
            host = self.placement.host_of[member]
            if source == self.rank:
                assert gradients_MBD is not None
                gradient = gradients_MBD[place, :, : widths[member]].contiguous()
                if host == self.rank:
                    own[member] = gradient
                else:
                    sends.append((host, gradient))
            elif host == self.rank:
                own[member] = torch.empty(batch, widths[member], device=self.device)
                receives.append((source, own[member]))
        self.transfer(sends, receives)
        return own

    def transfer(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        """Post all at once; wait for what comes in. What goes out is waited for at the next gather."""
        if not sends and not receives:
            return
        messages = [message for _, message in sends + receives]
        operations = [dist.P2POp(dist.isend, message, to) for to, message in sends]
        operations += [dist.P2POp(dist.irecv, message, source) for source, message in receives]
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(messages):  # NCCL gives one work for the whole group: waiting orders streams, not the host
            for work in works:
                work.wait()
            return
        self.sending += list(zip(works[: len(sends)], messages[: len(sends)], strict=True))
        for work in works[len(sends) :]:
            work.wait()

    def finish_sending(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def floats(self, member: int, names: Sequence[str], batch: int) -> int:
        return batch * sum(self.widths[name][member] for name in names)

    def unpack(self, message: Tensor, member: int, names: Sequence[str], batch: int) -> Fields:
        widths = [self.widths[name][member] for name in names]
        values = message[checksum_floats() :].split([batch * width for width in widths])
        return {name: value.view(batch, -1) for name, value in zip(names, values, strict=True)}

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Every host of members calls; each gets the sum over hosts (what members share is trained by all of them)."""
        if self.member_group is None or not parameters:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.member_group)
        summed = flat.split([gradient.numel() for gradient in gradients])
        for parameter, gradient, total in zip(parameters, gradients, summed, strict=True):
            # Into the old tensor: a fused optimiser wants it in the memory order of the weights (channels_last).
            parameter.grad = gradient.copy_(total.view_as(gradient))

    def any_rank(self, flag: int) -> int:
        """All ranks call; each gets the largest flag."""
        return self.any_rank_later(flag)()

    def any_rank_later(self, flag: int) -> Callable[[], int]:
        """All ranks call, and none waits: each gets a function that waits for the largest flag."""
        if self.placement.world_size == 1:
            return lambda: flag
        largest = torch.tensor([flag])
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)

        def wait() -> int:
            work.wait()
            return int(largest)

        return wait

    def report(self, record: dict) -> list[dict]:
        """All ranks call with a record; the reporting rank 0 receives all of them, the others none."""
        if self.placement.world_size == 1:
            return [record]
        text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.placement.world_size)]
        dist.all_gather(sizes, torch.tensor([len(text)]))
        longest = int(max(sizes))
        padded = torch.nn.functional.pad(text, (0, longest - len(text)))
        received = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, received, dst=0)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(received or [], sizes, strict=False)]

    def collect(self, own: Mapping[int, Tensor], like: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
        """All ranks call with a CPU tensor per hosted member, of the shapes `like`; rank 0 receives every member's."""
        received: list[Tensor] = []
        for member, host in enumerate(self.placement.host_of):
            if host == self.rank == 0:
                received.append(own[member])
            elif host == self.rank:
                dist.send(own[member].contiguous(), dst=0)
            elif self.rank == 0:
                received.append(torch.empty(like[member]))
                dist.recv(received[-1], src=host)
        return received if self.rank == 0 else None

    def barrier(self) -> None:
        """All ranks call; none goes on before the last has come."""
        self.any_rank(0)

    def bytes_per_step(self, batch: int, num_common: int = 0) -> dict[str, int]:
        """What all ranks together send in one step.

        num_common: parameters that the hosts of members sum the gradients of, counted as a ring moves them.
        """
        source, hosts = self.placement.discriminator, self.placement.member_ranks
        away = [member for member in self.compared if source is not None and self.placement.host_of[member] != source]
        features, predictions = (
            sum(
                self.floats(member, [name for name in names if (name in FEATURES) == of_w], batch)
                for (_, member), names in self.routes.items()
            )
            for of_w in (True, False)
        )
        floats = {
            "features": features,
            "gradients": sum(self.floats(member, ["mean"], batch) for member in away),
            "predictions": predictions,
            "checksums": checksum_floats() * len(self.routes),
            "shared gradients": 2 * (len(hosts) - 1) * num_common,
        }
        return {name: torch.get_default_dtype().itemsize * count for name, count in floats.items() if count}


def pack(values: Sequence[Tensor], mark: Tensor) -> Tensor:
    """One flat message of torch's default float, which begins with the bits of the checksum."""
    dtype = torch.get_default_dtype()
    return torch.cat([mark.view(dtype)] + [value.detach().to(dtype).flatten() for value in values])


def checksum_floats() -> int:
    """The int64 of a checksum, counted in floats of a message."""
    return torch.int64.itemsize // torch.get_default_dtype().itemsize


def build_exchange(
    placement: Placement,
    world: World,
    method: Method,
    feature_dims: Sequence[int],
    num_classes: int,
    scales: bool = True,
) -> Exchange:
    """All ranks call: the group of the ranks that host members is made here. scales: w samples with the predicted."""
    of_w = FEATURES if scales and method.prior_rows(num_classes) else ("mean",)
    return Exchange(
        placement,
        world.rank,
        world.device,
        method.widths(feature_dims, num_classes),
        routes(placement, method, of_w),
        method.compared(placement.num_members),
        member_group(placement.member_ranks),
    )


def routes(placement: Placement, method: Method, of_w: tuple[str, ...]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Which rank receives what of which member: what w reads, and what the members hosted there must hear."""
    num_members, found = placement.num_members, {}
    for rank in range(placement.world_size):
        for member, host in enumerate(placement.host_of):
            reads = rank == placement.discriminator and member in method.compared(num_members)
            heard = [method.hears(listener, member, num_members) for listener in placement.members_on(rank)]
            names = dict.fromkeys(name for fields in [of_w if reads else (), *heard] for name in fields)
            if names and rank != host:
                found[rank, member] = tuple(names)
    return found


def member_group(hosts: Sequence[int]) -> dist.ProcessGroup | None:
    """All ranks call. None where one rank hosts all members, and on ranks that host none."""
    group = dist.new_group(list(hosts)) if len(hosts) > 1 else None
    return group if isinstance(group, dist.ProcessGroup) else None
