"""The rendezvous of several nodes, which may come and go: torch's own, wrapped in a handler that adds what it lacks.

torch decides which nodes take part in a round. Nothing in torch is replaced: `Fixed` and `Nodes` implement its public
`RendezvousHandler`. Both add this:

- A launcher that was asked to stop waits for the others at their last barrier. Otherwise they wait for it for five
  minutes.

`Nodes`, for nodes that come and go, also adds this:

- A new store for the ranks of each round. torch keeps the store of the first round. A node that joins later never
  learns its address, and when the store's host is lost, the other nodes keep trying to reach it.
- The number of the round for all ranks. torch counts the restarts of each node on its own.
- One decision of all nodes to let a new node in. Otherwise the first launcher that sees the new node stops the ranks of
  all nodes, and another launcher takes the run for finished.
- A new name for a run that a store outside the nodes remembers as ended, which this launch continues.

Checked with torch 2.13.0, 2.14.1 and 2.15.0: `tests/unit/test_elastic.py`, and `python -m tests.nodes` with 2.14.1.
"""

import contextlib
import inspect
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from torch.distributed.elastic.utils.store import barrier

from dicedist.cluster.process import ATTEMPT, LAUNCHER
from dicedist.console.lines import say

BACKEND = "nodes"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's switch: the handler makes no store for the ranks
LAST_BARRIER = "torchelastic/agent/terminal_state"  # the key at which torch's agents wait for each other at the end
GOODBYE = 5.0  # seconds that a stopped launcher waits for the others
LET_IN = 15.0  # seconds that a launcher waits for the others to notice a new node
SILENCE = 10.0  # seconds, twice the interval between two signs of life of a launcher
EXPECTED: dict[Callable[..., Any], list[str]] = {  # the functions of torch that are used here, with their parameters
    create_backend: ["params"],
    create_handler: ["store", "backend", "params"],
    C10dRendezvousBackend: ["store", "run_id"],
    RendezvousInfo: ["store", "rank", "world_size", "bootstrap_store_info"],
    RendezvousStoreInfo.build: ["rank", "store", "local_addr", "server_port"],
}
_joined: "Fixed | None" = None


def serve(host: str, port: int) -> None:
    """Serve the store of a rendezvous at this address only, until a signal ends the process."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    say(f"nodes meet here: --rdzv-backend=c10d --rdzv-endpoint={host}:{port}")
    while store is not None:
        time.sleep(3600)


def why_unsupported() -> str | None:
    """Return how this version of torch differs from the supported ones; None if nodes may come and go with it."""
    for function, names in EXPECTED.items():
        if list(inspect.signature(function).parameters)[: len(names)] != names:
            return f"{function.__qualname__} takes other arguments"
    if RendezvousHandler.__abstractmethods__ - Fixed.__dict__.keys():
        return "RendezvousHandler has other methods"
    if getattr(agent_api, "_TERMINAL_STATE_SYNC_ID", None) != LAST_BARRIER:
        return "agents use another last barrier"
    if OWN_STORE not in inspect.getsource(DynamicRendezvousHandler):
        return f"{OWN_STORE} is not read"
    return None


def join(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of this node; torch calls this once."""
    global _joined
    if "rank" in parameters.config:
        parameters.config["rank"] = int(parameters.config["rank"])
        _joined = Fixed(create_rdzv_handler(parameters))
    else:
        _joined = Nodes(parameters)
    return _joined


def leave() -> None:
    """Meet the other launchers at their last barrier, after this one was asked to stop."""
    if _joined is not None and (round := _joined.round) is not None:
        with contextlib.suppress(DistError):  # the others do not end, or the store is gone
            barrier(round.store, round.world_size, LAST_BARRIER, GOODBYE)


class Fixed(RendezvousHandler):
    """The handler of one node and its present round. The launcher's agent calls it."""

    def __init__(self, torchs: RendezvousHandler):
        self.torchs = torchs
        self.round: RendezvousInfo | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.round = self.torchs.next_rendezvous()
        return self.round

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.torchs.get_run_id()

    def num_nodes_waiting(self) -> int:
        return self.torchs.num_nodes_waiting()

    def is_closed(self) -> bool:
        return self.torchs.is_closed()

    def set_closed(self) -> None:
        self.torchs.set_closed()

    def shutdown(self) -> bool:
        return self.torchs.shutdown()


class Nodes(Fixed):
    """The handler of one node among nodes that come and go."""

    def __init__(self, parameters: RendezvousParameters):
        os.environ[OWN_STORE] = "1"
        _, self.store = create_backend(parameters)
        self.address, self.name = parameters.local_addr, parameters.run_id
        super().__init__(self.open(parameters))
        self.server: TCPStore | None = None  # the store of the ranks, if this node keeps it

    def open(self, parameters: RendezvousParameters) -> RendezvousHandler:
        """Join the run of this name, or its next launch if the last one has ended.

        Launchers of the last launch may still be leaving, so their state must not have changed for a while.
        """
        seen, since = None, time.monotonic()
        while True:
            launch = self.store.add(f"dicedist/{self.name}", 0)
            parameters.run_id = f"{self.name}.{launch}" if launch else self.name
            backend = C10dRendezvousBackend(self.store, parameters.run_id)
            handler = create_handler(self.store, backend, parameters)
            if not handler.is_closed():
                return handler
            if (found := backend.get_state()) != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > SILENCE:
                self.store.compare_set(f"dicedist/{self.name}", str(launch), str(launch + 1))
            time.sleep(1)

    def next_rendezvous(self) -> RendezvousInfo:
        for path in Path(os.environ[LAUNCHER]).glob("*"):
            if path.is_file():  # the exit code of a rank that ended in the round before
                path.unlink()
        found = self.torchs.next_rendezvous()
        store, port = PrefixStore("dicedist", found.store), 0
        self.server = None
        if found.rank == 0:
            assert found.bootstrap_store_info is not None
            self.server = TCPStore(found.bootstrap_store_info.master_addr, 0, is_master=True, wait_for_workers=False)
            port = self.server.port
            store.set("attempt", str(self.store.add(f"dicedist/{self.torchs.get_run_id()}/rounds", 1) - 1))
        address = RendezvousStoreInfo.build(found.rank, store, self.address, port)
        os.environ[ATTEMPT] = store.get("attempt").decode()
        self.round = RendezvousInfo(found.store, found.rank, found.world_size, address)
        return self.round

    def num_nodes_waiting(self) -> int:
        """Report new nodes only when all launchers of this round have noticed them, or one of them takes too long."""
        if self.round is None or not self.torchs.num_nodes_waiting():
            return 0
        store, deadline = PrefixStore("dicedist", self.round.store), time.monotonic() + LET_IN
        noticed = store.add("noticed", 1)
        while waiting := self.torchs.num_nodes_waiting():
            if noticed >= self.round.world_size or time.monotonic() > deadline:
                return waiting
            time.sleep(0.1)
            noticed = store.add("noticed", 0)
        store.add("noticed", -1)
        return 0
