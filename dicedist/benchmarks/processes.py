"""Ranks without torchrun: a function run by forked processes that can join one group."""

import gc
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """[function(rank, *arguments) for each rank], all at once; inside, `cluster.world.joined` makes them a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    answers, processes = [], []
    for rank in range(world_size):
        answer, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(rank, world_size, port, function, arguments, sender)))
        processes[-1].start()
        sender.close()  # then the rank has the only copy, and its death ends the wait for its answer
        answers.append(answer)
    try:
        gathered = [received(answer) for answer in answers]
    except BaseException:  # interrupted, or the time of a test is up: none is left behind, each says where it was
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
        raise
    for process in processes:
        process.join()
    if failed := [f"rank {rank}: {result}" for rank, (ok, result) in enumerate(gathered) if not ok]:
        raise RuntimeError("\n".join(failed))
    return [result for _, result in gathered]


def received(answer: Connection) -> tuple[bool, Any]:
    try:
        return answer.recv()
    except EOFError:
        return False, "it died without an answer"


def work(
    rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple, answer: Connection
) -> None:
    gc.freeze()  # garbage of the parent is never collected here: a finaliser might wait for one of its threads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        answer.send((True, function(rank, *arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
