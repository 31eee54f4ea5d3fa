"""Every message between ranks; the only caller of collectives.

One step, with the discriminator w on a rank of its own (a member beside w sends nothing, its tensors are handed over):

    member 0  --- mean, scale, checksum --->            --- d loss / d mean --->  member 0
    member 1  --- mean, scale, checksum --->  rank of w --- d loss / d mean --->  member 1
    ...                       gather                          scatter              ...

Methods on predictions send logits to every rank that hosts members instead; independent ones send nothing. A message
goes from one rank straight to another (grouped send and receive, which NCCL and gloo both have): a member never
receives what it does not need.

Legend: M members, B inputs, D features, K classes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dicedist.objectives import Method
from dicedist.placement import Placement
from dicedist.world import World

CHECKSUM_FLOATS = 2  # an int64 in a message of float32
Fields = dict[str, Tensor]


@dataclass
class Gathered:
    """What reached this rank: by member, the fields sent; and who was out of step (1) or not (0)."""

    fields: dict[int, Fields]
    out_of_step_M: Tensor

    def stacked(self, name: str, width: int) -> Tensor:
        """[M, B, width], members with fewer features filled up with zeros."""
        rows = [self.fields[member][name] for member in sorted(self.fields)]
        return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows])


@dataclass
class Exchange:
    """The messages of this rank. In a single process every host is this rank, so nothing is ever sent."""

    placement: Placement
    rank: int
    device: torch.device
    widths: Mapping[str, Sequence[int]]  # by field, floats per input for each member
    to_discriminator: tuple[str, ...]  # fields
    to_members: tuple[str, ...]
    member_group: dist.ProcessGroup | None = None
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def wanted_by(self, rank: int) -> tuple[str, ...]:
        """The fields of every member that this rank must see."""
        peers = self.to_members if rank in self.placement.member_ranks else ()
        return peers + (self.to_discriminator if rank == self.placement.discriminator else ())

    def gather(self, own: Mapping[int, Fields], batch: int, mark: Tensor) -> Gathered:
        """Hosts of members call with their members' fields; ranks that want fields receive them of every member.

        mark: the batch's checksum, int64 [1], which every rank computes for itself and compares with the senders'.
        """
        self.finish_sending()
        sends, receives = [], {}
        for receiver in range(self.placement.world_size):
            wanted = self.wanted_by(receiver)
            for member, host in enumerate(self.placement.host_of):
                if host == receiver or not wanted:
                    continue
                if host == self.rank:
                    sends.append((receiver, pack([own[member][name] for name in wanted], mark)))
                elif receiver == self.rank:
                    size = batch * sum(self.widths[name][member] for name in wanted) + CHECKSUM_FLOATS
                    receives[member] = torch.empty(size, device=self.device)
        self.transfer(sends, [(self.placement.host_of[member], message) for member, message in receives.items()])
        gathered = {member: {name: value.detach() for name, value in fields.items()} for member, fields in own.items()}
        out_of_step_M = torch.zeros(self.placement.num_members, dtype=torch.int64, device=self.device)
        wanted = self.wanted_by(self.rank)
        for member, message in receives.items():
            gathered[member] = self.unpack(message, member, wanted, batch)
            out_of_step_M[member] = (message[-CHECKSUM_FLOATS:].view(torch.int64) != mark)[0]
        return Gathered(gathered, out_of_step_M)

    def scatter(self, gradients_MBD: Tensor | None, batch: int) -> dict[int, Tensor]:
        """The rank of w calls with every member's gradient; each host receives its own members' [B, D]."""
        source = self.placement.discriminator
        if source is None:
            return {}
        widths, own, sends, receives = self.widths["mean"], {}, [], []
        for member, host in enumerate(self.placement.host_of):
            if source == self.rank:
                assert gradients_MBD is not None
                gradient = gradients_MBD[member, :, : widths[member]].contiguous()
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

    def unpack(self, message: Tensor, member: int, names: Sequence[str], batch: int) -> Fields:
        widths = [self.widths[name][member] for name in names]
        values = message[:-CHECKSUM_FLOATS].split([batch * width for width in widths])
        return {name: value.view(batch, -1) for name, value in zip(names, values, strict=True)}

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Every host of members calls; each gets the sum over hosts (what members share is trained by all of them)."""
        if self.member_group is None or not parameters:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.member_group)
        for parameter, summed in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = summed.view_as(parameter)

    def any_rank(self, flag: int) -> int:
        """All ranks call; each gets the largest flag."""
        if self.placement.world_size == 1:
            return flag
        largest = torch.tensor([flag])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

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

    def bytes_per_step(self, batch: int) -> dict[str, int]:
        """What one step sends: features to w, gradients back, predictions among members, and the checksums."""
        floats = {name: 4 * batch * sum(widths) for name, widths in self.widths.items()}
        num_members = self.placement.num_members
        sent = {}
        if self.placement.discriminator is not None:
            sent["features"] = sum(floats[name] for name in self.to_discriminator)
            sent["gradients"] = floats["mean"]
            sent["checksums"] = 4 * CHECKSUM_FLOATS * num_members
        if self.to_members:
            sent["predictions"] = sum(floats[name] for name in self.to_members) * (len(self.placement.member_ranks) - 1)
        return sent


def pack(values: Sequence[Tensor], mark: Tensor) -> Tensor:
    """One flat float32 message, its last two floats the bits of the checksum."""
    return torch.cat([value.detach().float().flatten() for value in values] + [mark.view(torch.float32)])


def build_exchange(
    placement: Placement, world: World, method: Method, feature_dims: Sequence[int], num_classes: int
) -> Exchange:
    """All ranks call: the group of the ranks that host members is made here."""
    hosts = placement.member_ranks
    return Exchange(
        placement,
        world.rank,
        world.device,
        {"mean": feature_dims, "scale": feature_dims, "logits": [num_classes] * placement.num_members},
        ("mean", "scale") if method.prior_rows(num_classes) else ("mean",),
        method.sends,
        member_group(hosts),
    )


def member_group(hosts: Sequence[int]) -> dist.ProcessGroup | None:
    """All ranks call. None where one rank hosts all members, and on ranks that host none."""
    group = dist.new_group(list(hosts)) if len(hosts) > 1 else None
    return group if isinstance(group, dist.ProcessGroup) else None
