"""Joining and leaving the group of ranks."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from dicedist.cluster import process
from dicedist.cluster.channel import CHANNEL, Channel
from dicedist.cluster.control import Control
from dicedist.cluster.devices import pick_device
from dicedist.cluster.heartbeat import Heartbeat, between_ranks
from dicedist.cluster.placement import REPORTER
from dicedist.cluster.process import LAUNCHER, SECRET, STORE_PATIENCE, this_rank, under_agent, world_size
from dicedist.cluster.transfer import FileTransfer
from dicedist.console.lines import warn

Store = dist.Store | Channel
FOREVER = timedelta(days=365)  # no timeout: the heartbeat distinguishes a hang from a long wait
ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737), reached by the default route


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    transfer: FileTransfer | None = None  # of files between nodes; a single process needs none

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def control(self) -> Control:
        return Control(self.rank, self.size)

    @property
    def reports(self) -> bool:
        """Return whether this rank keeps the records and prints the output."""
        return self.rank == REPORTER


@dataclass(frozen=True)
class Joined:
    """The store of the group and this rank's heartbeat in it, from the handshake until the group is left."""

    store: Store
    heartbeat: Heartbeat


@contextlib.contextmanager
def joined(timeout: float, parts: Sequence[str] = ()) -> Iterator[World]:
    """Make this process a rank of the group, or the only rank. NCCL carries GPU tensors, gloo carries records.

    parts: a description of each rank's parts, for error messages.
    """
    device, size = pick_device(), world_size()
    if size == 1:
        yield World(0, 1, device)
        return
    choose_interface()
    here = enter(timeout)
    if parts:
        here.heartbeat.names = [f"rank {rank} ({part})" for rank, part in enumerate(parts)]
    on_gpu = device.type == "cuda"
    with between_ranks():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=rendezvous(timedelta(seconds=timeout)) if isinstance(here.store, Channel) else here.store,
            rank=this_rank(),
            world_size=size,
            timeout=FOREVER,
            device_id=device if on_gpu else None,
        )
    if this_rank() == REPORTER:
        warn_of_exposed_store()
    yield World(this_rank(), size, device, FileTransfer(here.store.clone()))
    dist.destroy_process_group()
    here.heartbeat.leave()
    if keeps_store():
        here.heartbeat.outlast()
    process.group = None


def enter(timeout: float) -> Joined:
    """Join the store and start the heartbeat; later calls return the same object until the group is left."""
    if process.group is None:
        store = connect(timedelta(seconds=timeout))
        names = [f"rank {rank}" for rank in range(world_size())]
        # On a second connection, because the main thread may block the first while it waits for a key.
        pulse = Heartbeat(store.clone(), this_rank(), names, os.environ["MASTER_ADDR"], timeout, process.end)
        process.group = Joined(store, pulse)
    return process.group


def keeps_store() -> bool:
    return this_rank() == 0 and not under_agent()


def connect(limit: timedelta) -> Store:
    """Return the store for messages between ranks: the launcher's channel on one node, otherwise torch's."""
    if CHANNEL in os.environ:
        return Channel(os.environ[CHANNEL], f"attempt-{process.attempt()}", limit.total_seconds())
    return rendezvous(limit)


def rendezvous(limit: timedelta) -> dist.Store:
    """Return the store through which torch's process groups find each other."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, world_size(), keeps_store(), limit)
    # A restarted attempt must not read keys that the previous attempt left in the agent's store. Only processes that
    # know the secret may write keys that these ranks read.
    return dist.PrefixStore(f"{os.environ.get(SECRET, '')}/attempt-{process.attempt()}", server)


def is_first_in_store(code: int) -> bool:
    """Return whether this rank is the first to report why the group ends.

    If so, the other ranks' heartbeats end them with this code. A rank that fails before it has joined uses the store
    that the agent serves.
    """
    try:
        store = process.group.store if process.group else connect(timedelta(seconds=STORE_PATIENCE))
        first = store.add("told", 1) == 1
        if first:
            store.set("ended", str(code))
        return first
    except RuntimeError:  # the process that kept the store is gone
        return this_rank() == 0


def choose_interface() -> None:
    """Restrict a group on one node to loopback; on several nodes, let gloo use the interface to MASTER_ADDR.

    By default gloo uses the interface of the host's name, which in a container or a cluster may lead nowhere.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
            os.environ.setdefault(variable, str(loopback))
    elif "LOCAL_WORLD_SIZE" in os.environ and (name := interface_to(os.environ["MASTER_ADDR"])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def warn_of_exposed_store() -> None:
    """Warn if the internet may reach torchrun's store of one node: the store unpickles data from any client.

    On a private network every torchrun listens like this. docs/security.md covers it, so there is no warning.
    """
    if LAUNCHER in os.environ or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return
    port = int(os.environ["MASTER_PORT"])
    try:
        listening = [
            at.laddr.ip for at in psutil.net_connections("tcp") if at.status == "LISTEN" and at.laddr.port == port
        ]
    except (OSError, psutil.Error):
        return
    if any(ip in ("0.0.0.0", "::") for ip in listening) and has_public_address():
        warn(
            f"torchrun's store listens on port {port} of a public address, and anybody who reaches it can run code as "
            f"this user: start with `dicedist train --nproc {world_size()}`, which listens to no other machine, or "
            "close the port"
        )


def has_public_address() -> bool:
    """Return whether an interface of this machine has a public address."""
    families = (socket.AF_INET, socket.AF_INET6)
    every = [entry for found in psutil.net_if_addrs().values() for entry in found if entry.family in families]
    return any(ipaddress.ip_address(entry.address.partition("%")[0]).is_global for entry in every)


def interface_to(host: str) -> str | None:
    own, every = own_address_to(host), psutil.net_if_addrs().items()
    return next((name for name, found in every if own in {entry.address for entry in found}), None)


def own_address_to(host: str) -> str | None:
    """Return the address at which another host reaches this machine; None if it cannot be found.

    If this machine's own name means loopback, as on Debian (127.0.1.1), others reach it by the default route. A host
    given as localhost or 127.0.0.1 stays on loopback.
    """
    own = source_address(host)
    loopback = own is not None and ipaddress.ip_address(own).is_loopback
    named = host != "localhost" and not host.startswith("127.") and host != "::1"
    return source_address(ELSEWHERE) or own if loopback and named else own


def source_address(host: str) -> str | None:
    try:
        *_, (family, kind, _, _, address) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None
