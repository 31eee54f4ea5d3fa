"""Test the messages between ranks of this machine: every rank sends to the last rank, which answers all of them.

Run by `python -m dicedist.launch --nproc_per_node=N -m dicedist.diagnosis.links FILE`. NCCL carries the messages
between GPUs, gloo between CPUs. Rank 0 writes the outcome to FILE.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dicedist.algorithm.messages import Answers, Traffic
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.placement import place
from dicedist.cluster.process import command, this_rank, world_size
from dicedist.cluster.world import joined

BATCH, WIDTH, ROUNDS, TIMEOUT = 128, 64, 20, 60.0


def run(arguments: Sequence[str]) -> None:
    """Send the messages of a step of DICE, with features whose values identify the sender."""
    members = max(2, world_size() - 1)
    placement = place(world_size(), members, needs_discriminator=True)
    received = {(one, other): () for one in range(members) for other in range(members)}
    traffic = Traffic({"mean": [WIDTH] * members}, received, ("mean",), range(members))
    with joined(TIMEOUT) as world:
        exchange = Exchange(placement, world.rank, world.device, traffic)
        mark = torch.zeros(1, dtype=torch.int64, device=world.device)
        own = {
            member: {"mean": torch.full((BATCH, WIDTH), float(member), device=world.device)}
            for member in placement.members_on(world.rank)
        }
        right = True
        for nth in range(ROUNDS + 1):
            if nth == 1:
                began = time.perf_counter()
            gathered = exchange.gather(own, BATCH, mark)
            stacked = gathered.stacked("mean", range(members)) if this_rank() == placement.discriminator else None
            answers = exchange.scatter(None if stacked is None else Answers({"mean": stacked + 1}), BATCH)
            right &= all(bool((answer.gradients["mean"] == member + 1).all()) for member, answer in answers.items())
        milliseconds = 1000 * (time.perf_counter() - began) / ROUNDS
        records = world.control.report({"right": right})
        if world.reports:
            backend = "NCCL" if world.device.type == "cuda" else "gloo"
            seen = {"backend": backend, "right": all(r["right"] for r in records), "milliseconds": milliseconds}
            Path(arguments[0]).write_text(json.dumps(seen))


if __name__ == "__main__":
    command(run)
