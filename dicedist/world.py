"""The group of ranks: joining it, leaving it, and telling an error once, in one line."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

EXIT_USER, EXIT_FAULT = 2, 1
_store: "dist.Store | None" = None  # where ranks agree on who tells an error; None outside a group


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def host(self) -> str:
        return socket.gethostname()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def pick_device() -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    ranks_here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks_here > gpus:
        raise ValueError(
            f"{ranks_here} ranks on this node but {gpus} GPUs: torchrun --nproc_per_node={gpus} "
            "(members are dealt over them), or CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    return device


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[World]:
    """Inside, this process is a rank of the group, or the only one. GPU tensors go by NCCL, records by gloo."""
    global _store
    device, size = pick_device(), world_size()
    if size == 1:
        yield World(0, 1, device)
        return
    limit = timedelta(seconds=timeout)
    under_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, size, this_rank() == 0 and not under_agent, limit)
    # A restarted attempt must not read the addresses that the ranks of the last one left in the agent's store.
    _store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store,
        rank=this_rank(),
        world_size=size,
        timeout=limit,
        device_id=device if on_gpu else None,
    )
    yield World(this_rank(), size, device)
    dist.destroy_process_group()
    _store = None


class EndedElsewhere(Exception):
    """Another rank tells why; this one only ends."""


def command(run: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run an entry point: an error is one line from one rank and an exit code; DICEDIST_DEBUG=1 adds its traceback."""
    try:
        run(sys.argv[1:])
    except EndedElsewhere:
        leave(EXIT_USER)
    except KeyboardInterrupt:
        tell("interrupted")
        leave(130)
    except (ValueError, OSError) as error:
        tell(one_line(error))
        leave(EXIT_USER)
    except Exception as error:
        tell(f"{type(error).__name__}: {one_line(error)} (DICEDIST_DEBUG=1 shows where)")
        leave(EXIT_FAULT)
    leave(0)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def tell(message: str) -> None:
    """The first rank to come here speaks; what follows from its failure on other ranks stays unsaid."""
    if os.environ.get("DICEDIST_DEBUG") == "1":
        raise
    if _store is None:
        first = os.environ.get("LOCAL_RANK", "0") == "0"
    else:
        try:
            first = _store.add("told", 1) == 1
        except RuntimeError:  # the store went with the rank or agent that kept it
            first = this_rank() == 0
    if first:
        print(f"dicedist: {message}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End without the interpreter's clean-up: threads of a broken group could hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
