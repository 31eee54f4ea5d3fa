"""Processes of a benchmark: alternatives that take turns, and ranks without torchrun, which can join one group."""

import gc
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def start(kind: str, function: Callable[..., None], *arguments: Any, daemon: bool) -> tuple[BaseProcess, Connection]:
    """Run function(*arguments, pipe) in a new process; return the process and the near end of its pipe.

    kind: fork | spawn.
    """
    context: Any = multiprocessing.get_context(kind)
    near, far = context.Pipe()
    process = context.Process(target=function, args=(*arguments, far), daemon=daemon)
    process.start()
    far.close()  # the process then has the only copy, and its death breaks the pipe
    return process, near


def ask(end: Connection, request: object, name: str) -> Any:
    """Send a request to a process and return its answer. name: for error messages."""
    try:
        end.send(request)
        return end.recv()
    except (EOFError, BrokenPipeError) as error:
        raise RuntimeError(f"{name} ended by itself, for the reason above") from error


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return [function(rank, *arguments) for each rank], run in parallel; `cluster.world.joined` makes them a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(world_size)
    started = [start("fork", work, rank, world_size, port, function, arguments, daemon=False) for rank in ranks]
    try:
        gathered = [received(end, process) for process, end in started]
    except BaseException:  # interrupted, or a test timed out: end all processes, and let each print its stack
        for process, _ in started:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
        raise
    for process, _ in started:
        process.join()
    if failed := [f"rank {rank}: {result}" for rank, (ok, result) in enumerate(gathered) if not ok]:
        raise RuntimeError("\n".join(failed))
    return [result for _, result in gathered]


def received(end: Connection, process: BaseProcess) -> tuple[bool, Any]:
    try:
        return end.recv()
    except EOFError:
        process.join()
        return False, f"it died without an answer, with exit code {process.exitcode}"


def work(
    rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple, answer: Connection
) -> None:
    gc.freeze()  # never collect the parent's garbage: a finalizer might wait for one of its threads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        answer.send((True, function(rank, *arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
