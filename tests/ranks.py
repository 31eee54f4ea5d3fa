"""Ranks for tests: a function run by every rank of a group, as processes on gloo."""

import os
import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size, function, *arguments):
    """[function(rank, *arguments) for each rank], in one group of processes; a single rank runs in this one."""
    if world_size == 1:
        return [function(0, *arguments)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=work, args=(rank, world_size, port, function, arguments, results))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    gathered = dict(results.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    failed = {rank: result for rank, (ok, result) in gathered.items() if not ok}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [gathered[rank][1] for rank in range(world_size)]


def work(rank, world_size, port, function, arguments, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        results.put((rank, (True, detached(function(rank, *arguments)))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, (False, traceback.format_exc())))


def detached(value):
    """Tensors as numpy arrays and back: a queue would send handles of memory that goes with its process."""
    if isinstance(value, torch.Tensor):
        return Sent(value.numpy())
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(detached(item) for item in value)
    return value


class Sent:
    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        return torch.from_numpy, (self.array,)
