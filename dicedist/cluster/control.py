"""Records and agreements between all ranks, on the host."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dicedist.cluster.heartbeat import between_ranks
from dicedist.cluster.placement import REPORTER

Record = dict[str, Any]  # any JSON object


class Control:
    """Every method is collective: all ranks call it together. A single process sends nothing."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    @property
    def reports(self) -> bool:
        """Return whether this rank keeps the records and prints the output."""
        return self.rank == REPORTER

    def maximum(self, flag: int) -> int:
        """Return the largest flag of all ranks."""
        return self.maximum_later(flag)()

    def maximum_later(self, flag: int) -> Callable[[], int]:
        """Start `maximum` without waiting; return a function that waits for the largest flag."""
        if self.world_size == 1:
            return lambda: flag
        largest = torch.tensor([flag])
        with between_ranks():
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)

        def wait() -> int:
            with between_ranks():
                work.wait()
            return int(largest)

        return wait

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.maximum(0)

    def broadcast(self, record: Record) -> Record:
        """Return rank 0's record on every rank."""
        if self.world_size == 1:
            return record
        text = encoded(record)
        length = torch.tensor([len(text)])
        with between_ranks():
            dist.broadcast(length, src=REPORTER)
            received = text if self.reports else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(received, src=REPORTER)
        return decoded(received)

    def report(self, record: Record) -> list[Record]:
        """Return the records of all ranks on rank 0, and an empty list on the others."""
        if self.world_size == 1:
            return [record]
        text = encoded(record)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with between_ranks():
            dist.all_gather(sizes, torch.tensor([len(text)]))
            padded = torch.nn.functional.pad(text, (0, int(max(sizes)) - len(text)))
            received = [torch.empty_like(padded) for _ in sizes] if self.reports else None
            dist.gather(padded, received, dst=REPORTER)
        return [decoded(row[:size]) for row, size in zip(received or [], sizes, strict=False)]

    def collect(self, own: Mapping[int, Tensor], hosts: Sequence[int]) -> list[Tensor] | None:
        """Gather one float tensor [rows, width] per member on rank 0, in the order of members; None on other ranks.

        own: this rank's tensors by member, on the CPU; their shapes may differ. hosts: the rank that sends each member.
        """
        received: list[Tensor] = []
        with between_ranks():
            for member, host in enumerate(hosts):
                if host == self.rank == REPORTER:
                    received.append(own[member])
                elif host == self.rank:
                    dist.send(torch.tensor(own[member].shape), dst=REPORTER)
                    dist.send(own[member].contiguous(), dst=REPORTER)
                elif self.reports:
                    shape = torch.empty(2, dtype=torch.int64)
                    dist.recv(shape, src=host)
                    received.append(torch.empty(shape.tolist()))
                    dist.recv(received[-1], src=host)
        return received if self.reports else None


ALONE = Control(REPORTER, world_size=1)


def encoded(record: Record) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)


def decoded(text: Tensor) -> Record:
    return json.loads(bytes(text.tolist()))
