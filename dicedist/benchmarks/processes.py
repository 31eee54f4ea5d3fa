"""Ranks without torchrun: a function run by forked processes that can join one group."""

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """[function(rank, *arguments) for each rank], all at once; inside, `cluster.world.joined` makes them a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=work, args=(rank, world_size, port, function, arguments, results))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    gathered = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    failed = [f"rank {rank}: {result}" for rank, (ok, result) in sorted(gathered.items()) if not ok]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [gathered[rank][1] for rank in range(world_size)]


def work(rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple, results: Any) -> None:
    gc.freeze()  # garbage of the parent is never collected here: a finaliser might wait for one of its threads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        results.put((rank, (True, function(rank, *arguments))))
    except BaseException:
        results.put((rank, (False, traceback.format_exc())))
