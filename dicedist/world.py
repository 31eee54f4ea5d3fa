"""The group of ranks: joining it, leaving it, and telling an error once, in one line.

Exit codes: 0 done, 1 a fault (a launcher may start the run again), 2 refused or failed for a reason that a restart does
not mend, 75 stopped on request (the same command continues).
"""

import contextlib
import ctypes
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from dicedist import signals
from dicedist.devices import pick_device, too_small
from dicedist.shelf import Shelf
from dicedist.watch import Watch

EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 1, 2, 75
LAUNCHER = "DICEDIST_LAUNCHER"  # the folder in which `dicedist.launch` expects the exit code of each of its ranks
STORE_PATIENCE = 5.0  # seconds
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
_store: "dist.Store | None" = None  # where ranks agree on who tells an error; None outside a group
_watch: Watch | None = None
_leaving = threading.Lock()


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    shelf: Shelf | None = None  # for files; a single process needs none

    @property
    def host(self) -> str:
        return socket.gethostname()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def joined(timeout: float, parts: Sequence[str] = ()) -> Iterator[World]:
    """Inside, this process is a rank of the group, or the only one. GPU tensors go by NCCL, records by gloo.

    parts: what each rank hosts, for messages.
    """
    global _store, _watch
    device, size = pick_device(), world_size()
    if size == 1:
        yield World(0, 1, device)
        return
    choose_interface()
    store, watch = enter(timeout)
    watch.names = [f"{name} ({part})" for name, part in zip(watch.names, parts, strict=True)] if parts else watch.names
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=this_rank(),
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device if on_gpu else None,
    )
    yield World(this_rank(), size, device, Shelf(store.clone()))
    dist.destroy_process_group()
    watch.leave()
    if keeps_store():
        watch.outlast()
    _store = _watch = None


def meet(card: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
    """All ranks call before the group is made, with something to say of themselves; each gets what all said."""
    if world_size() == 1:
        return [{**card}]
    store, _ = enter(timeout)
    store.set(f"card/{this_rank()}", json.dumps(card))
    cards = []
    for rank in range(world_size()):
        try:
            cards.append(json.loads(store.get(f"card/{rank}")))
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} did not come within {timeout:.0f} s") from error
    return cards


def enter(timeout: float) -> tuple[dist.Store, Watch]:
    """Join the store and be watched, once, until the group is left."""
    global _store, _watch
    if _store is None or _watch is None:
        _store = connect(timedelta(seconds=timeout))
        names = [f"rank {rank}" for rank in range(world_size())]
        # With a connection of its own: the main thread may hold the other one while it waits for a key.
        _watch = Watch(_store.clone(), this_rank(), names, os.environ["MASTER_ADDR"], timeout, end)
    return _store, _watch


def under_agent() -> bool:
    """Whether torchrun's agent keeps the store, which then outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def keeps_store() -> bool:
    return this_rank() == 0 and not under_agent()


def connect(limit: timedelta) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, world_size(), keeps_store(), limit)
    # A restarted attempt must not read what the ranks of the last one left in the agent's store.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)


def choose_interface() -> None:
    """A group on one node listens to no other; gloo on several takes the interface by which they meet.

    Left alone, gloo takes that of the host's name, which in a container or a cluster may lead nowhere.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
            os.environ.setdefault(variable, str(loopback))
    elif "LOCAL_WORLD_SIZE" in os.environ and (name := interface_to(os.environ["MASTER_ADDR"])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_to(host: str) -> str | None:
    own, every = own_address_to(host), psutil.net_if_addrs().items()
    return next((name for name, found in every if own in {entry.address for entry in found}), None)


def own_address_to(host: str) -> str | None:
    """By which this machine reaches another, or itself; None if that cannot be told."""
    try:
        *_, (family, kind, _, _, address) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


class EndedElsewhere(Exception):
    """Another rank tells why; this one only ends."""


def command(run: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run an entry point: an error is one line from one rank and an exit code; DICEDIST_DEBUG=1 adds tracebacks."""
    signals.listen()
    if this_rank() > 0:
        logging.disable(logging.WARNING)  # what all ranks notice, one of them tells
    try:
        run(sys.argv[1:])
    except (Exception, signals.Stopped) as error:
        with signals.deferred():
            end(*explained(error))
    leave(0)


def keep_memory() -> None:
    """Activations live in memory that glibc would return to the system and fetch anew, a page at a time, every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def explained(error: BaseException) -> tuple[str, int]:
    """What to say, and the exit code."""
    if isinstance(error, EndedElsewhere):
        return "", EXIT_USER
    if isinstance(error, ValueError | OSError):
        return one_line(error), EXIT_USER
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        return f"{named()}{too_small(torch.device('cuda', torch.cuda.current_device()))}", EXIT_USER
    if isinstance(error, signals.Stopped):
        # If not all ranks agreed on it, it may be a launcher that ends what the loss of a rank has left.
        gone = _watch.gone() if _watch and not error.args else None
        return (gone, EXIT_FAULT) if gone else (str(error) or "stopped on request", EXIT_STOPPED)
    frames = traceback.extract_tb(error.__traceback__)
    between_ranks = any(Path(frame.filename).stem in ("exchange", "distributed_c10d") for frame in frames)
    if _watch and between_ranks and (blamed := _watch.blame()):
        return blamed, EXIT_FAULT
    return f"{named()}{type(error).__name__}: {one_line(error)} (DICEDIST_DEBUG=1 shows where)", EXIT_FAULT


def named() -> str:
    """The beginning of a line that is about this rank."""
    return f"{_watch.names[this_rank()]}: " if _watch else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def end(message: str, code: int) -> NoReturn:
    """Tell why, unless another rank has: what follows from its failure stays unsaid."""
    if os.environ.get("DICEDIST_DEBUG") == "1" and sys.exception():
        traceback.print_exc()
    if message and is_first_to_end(code):
        print(f"dicedist: {message}", file=sys.stderr, flush=True)
    leave(code)


def is_first_to_end(code: int) -> bool:
    """If so, the watches of the other ranks end them with the same code."""
    answers: list[bool] = []
    # In a thread, because a store behind a cut link answers neither yes nor no.
    asking = threading.Thread(target=lambda: answers.append(ask_store(code)), daemon=True)
    asking.start()
    asking.join(STORE_PATIENCE)
    return answers[0] if answers else os.environ.get("LOCAL_RANK", "0") == "0"


def ask_store(code: int) -> bool:
    try:
        store = _store or (connect(timedelta(seconds=STORE_PATIENCE)) if under_agent() else None)
        if store is None:
            return os.environ.get("LOCAL_RANK", "0") == "0"
        first = store.add("told", 1) == 1
        if first:
            store.set("ended", str(code))
        return first
    except RuntimeError:  # the store went with whoever kept it
        return this_rank() == 0


def leave(code: int) -> NoReturn:
    """End without the interpreter's clean-up: threads of a broken group could hold it up."""
    _leaving.acquire()  # for ever: of the main thread and the watch, who may come here together, the first ends both
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if LAUNCHER in os.environ:
        (Path(os.environ[LAUNCHER]) / os.environ["LOCAL_RANK"]).write_text(str(code))
        if code in (EXIT_USER, EXIT_STOPPED):
            code = 0  # to torchrun's agent everything else is a fault, to be restarted
    os._exit(code)
