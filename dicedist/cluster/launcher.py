"""The torchrun wrapper behind `dicedist.launch`: restarts, exit codes, a store on loopback, limits on silent links."""

import os

# torch reads this at import. Otherwise this process would print a stack trace for every node that has not joined yet.
RANKS_LOG_LEVEL = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import argparse
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed import DistError, HashStore, PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from dicedist.cluster import channel, elastic
from dicedist.cluster.process import ATTEMPT, EXIT_FAULT, EXIT_STOPPED, EXIT_UNSENT, EXIT_USER, LAUNCHER
from dicedist.cluster.signals import ASKING
from dicedist.cluster.world import own_address_to

POLL = 5.0  # seconds
DEFAULTS = ["--max-restarts=3", "--signals-to-handle=none"]  # this module handles signals


class Loopback(StaticTCPRendezvous):
    """The rendezvous of a single node with itself."""

    def __init__(self, parameters: RendezvousParameters):
        listener = socket.create_server(("127.0.0.1", 0))
        address, port = listener.getsockname()
        super().__init__(address, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=60)
        self.own = HashStore()  # in this process: torchrun's agent meets only itself
        self.store = TCPStore(address, port, 1, True, timedelta(seconds=60), master_listen_fd=listener.detach())

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self.own), 0, 1, address)


def main(arguments: Sequence[str]) -> int:
    logging.disable()
    os.environ["TORCH_CPP_LOG_LEVEL"] = RANKS_LOG_LEVEL
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop(ATTEMPT, None)
    options = torchrun.parse_args([*DEFAULTS, *arguments])
    if options.nnodes in ("1", "1:1"):
        rendezvous_handler_registry.register("loopback", Loopback)
        options.standalone, options.rdzv_backend, options.rdzv_endpoint = False, "loopback", "127.0.0.1"
        options.rdzv_id = str(uuid.uuid4())
        if sys.platform == "linux":  # which has the abstract namespace of sockets
            os.environ[channel.CHANNEL] = channel.Keeper().name
    elif refused := prepare_nodes(options):
        print(f"dicedist: {refused}", file=sys.stderr)
        return EXIT_USER
    with tempfile.TemporaryDirectory(prefix="dicedist-", ignore_cleanup_errors=True) as folder:
        os.environ[LAUNCHER] = folder
        options.log_dir = options.log_dir or f"{folder}/logs"  # torchrun would leave a folder behind
        try:
            with passing_signals_on():
                torchrun.run(options)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"dicedist: gave up: rank {rank} ended with {ending(failure.exitcode)}", file=sys.stderr)
            return EXIT_FAULT
        except (RendezvousError, DistError, socket.gaierror) as error:
            if EXIT_STOPPED in (found := codes(folder)):  # the launcher that served the store was asked to stop
                return worst(found)
            print(f"dicedist: {unmet(options, error)}", file=sys.stderr)
            return worst([*found, EXIT_FAULT])
        except SignalException:
            elastic.leave()
            return worst([*codes(folder), EXIT_STOPPED])
        return worst(codes(folder))


def prepare_nodes(options: argparse.Namespace) -> str | None:
    """Set up the rendezvous of several nodes. Return a message if this torch does not support it."""
    # torchrun would use the host's name, which other nodes may not know.
    first = options.rdzv_endpoint.rpartition(":")[0] or options.master_addr
    options.local_addr = options.local_addr or own_address_to(first)
    if reason := elastic.why_unsupported():
        if ":" in options.nnodes:
            return (
                f"--nnodes={options.nnodes}: nodes cannot come and go with torch {torch.__version__} ({reason}): "
                "write the number of nodes, or install torch 2.14"
            )
    elif options.rdzv_backend in ("static", "c10d"):
        if options.rdzv_backend == "static":  # torchrun does this only for `static`
            options.rdzv_endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
            options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, f"rank={options.node_rank}"]))
        rendezvous_handler_registry.register(elastic.BACKEND, elastic.join)
        options.rdzv_backend = elastic.BACKEND
    if sys.platform == "linux":
        threading.Thread(target=notice_cut_links, args=(read_timeout(options),), daemon=True).start()
    return None


@contextlib.contextmanager
def passing_signals_on() -> Iterator[None]:
    """Let torchrun stop the ranks after the first signal, and pass later signals to the ranks only.

    torchrun would abort in the middle of stopping the ranks, and handle SIGHUP even under nohup.
    """
    asked = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise SignalException(f"got signal {number}", sigval=signal.Signals(number))
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    heard = [number for number in (*ASKING, signal.SIGQUIT) if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, receive)
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)  # the outcome of the run is known


def notice_cut_links(seconds: int) -> None:
    """Let the system close silent connections: torch waits for a store's answer without a limit."""
    while True:
        limit_silence(seconds)
        time.sleep(POLL)


def limit_silence(seconds: int) -> None:
    """Set the limit on every TCP connection of this process."""
    for link in psutil.Process().net_connections("tcp"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fd)) as connection:  # closed meanwhile
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def read_timeout(options: argparse.Namespace) -> int:
    """Return the seconds that torchrun's own setting gives a node's store to answer."""
    settings = dict(word.partition("=")[::2] for word in options.rdzv_conf.split(","))
    return int(settings.get("read_timeout", 60))


def unmet(options: argparse.Namespace, error: Exception) -> str:
    """Return why the rendezvous failed."""
    where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    if isinstance(error, RendezvousClosedError):
        return f"a launcher of another node has ended this run (--rdzv-id={options.rdzv_id} at {where})"
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {options.nnodes} nodes joined {where} in time: start the others, or write another --nnodes"
    reason = str(error.__cause__ or error).splitlines()[0]
    return (
        f"no connection to the rendezvous {where} ({reason}): write --rdzv-endpoint=HOST:PORT of the first node, the "
        "same on all nodes, with a port that is free there and open to the others"
    )


def codes(folder: str) -> list[int]:
    """Return the exit codes that the ranks of this node wrote; a rank killed while writing left an empty file."""
    return [int(text) for path in Path(folder).glob("*") if path.is_file() and (text := path.read_text())]


def worst(codes: Sequence[int]) -> int:
    return next((code for code in (EXIT_FAULT, EXIT_USER, EXIT_STOPPED, EXIT_UNSENT) if code in codes), 0)


def ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name
