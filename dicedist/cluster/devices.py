"""The device of this rank, and whether it has enough free memory. Errors give the amounts."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

GIB, MIB = 2**30, 2**20
LEAST_GPU = 1 * GIB  # CUDA's context and a ResNet-8 with its batch; with less free, another process uses the GPU
LEAST_SHARED = 16 * MIB  # per rank, for NCCL's buffers
SHARED = "/dev/shm"
LEAST_DRIVER = {"12": 525, "13": 580}  # by the CUDA of torch's wheel


def pick_device() -> torch.device:
    """Return the GPU of this rank, or the CPU if there is none."""
    if unusable := why_unusable():
        raise ValueError(f"{unusable}, or write CUDA_VISIBLE_DEVICES= to use the CPU")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    ranks_here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks_here > gpus:
        raise ValueError(
            f"{ranks_here} ranks on this node but {gpus} GPUs: torchrun --nproc_per_node={gpus} "
            "(members are dealt over them), or CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    refuse_taken(device)
    if ranks_here > 1:
        refuse_small_shared_memory(ranks_here)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high")
    return device


def make_deterministic() -> None:
    """Make GPUs deterministic, as torch's notes on reproducibility describe. Call before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def why_unusable() -> str | None:
    """Return why torch cannot use the GPUs of this machine, and what to do; None if it can, or if there are none."""
    if torch.cuda.is_available() or not (gpus := torch.cuda.device_count()):
        return None
    try:
        torch.cuda.init()
        reason = "no reason is given"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].strip().rstrip(".")
    cuda = str(torch.version.cuda)
    least = LEAST_DRIVER.get(cuda.partition(".")[0], "a")
    return (
        f"this machine has {gpus} GPUs, but torch cannot use them ({reason}): install NVIDIA driver {least} or newer, "
        f"which CUDA {cuda} of torch's wheel needs"
    )


def device_named(name: str) -> torch.device:
    """Return the device for auto | cpu | cuda, in a command that runs without ranks."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch finds no GPU here, write device=cpu")
    return pick_device() if name == "auto" else torch.device(name)


def refuse_taken(device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    if free < LEAST_GPU:
        raise ValueError(
            f"{gpu_name(device)} has {free / GIB:.1f} of {total / GIB:.1f} GiB free, other processes hold the rest: "
            "end them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES"
        )


def refuse_small_shared_memory(ranks_here: int) -> None:
    """Raise a ValueError if shared memory is too small for NCCL; a container has 64 MiB by default."""
    free, needed = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else 0, ranks_here * LEAST_SHARED
    if free < needed:
        raise ValueError(
            f"{SHARED} has {free / MIB:.0f} MiB free, {ranks_here} ranks need {needed / MIB:.0f}: docker run "
            "--shm-size=1g, or on Kubernetes an emptyDir with medium: Memory mounted there"
        )


def refuse_too_large(device: torch.device, needed: Mapping[str, int]) -> None:
    """Raise a ValueError if the parts do not fit. needed: bytes by kind of part, before any image."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if sum(needed.values()) > free:
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needed.items())
        where = gpu_name(device) if device.type == "cuda" else "this machine"
        raise ValueError(
            f"{where} has {free / GIB:.1f} GiB free, but weights, gradients and states of this rank need "
            f"{sum(needed.values()) / GIB:.1f} ({listed}): write network.feature_dim=256 or smaller (w and its memory "
            "grow with it), a smaller network, or use more ranks"
        )


def refuse_compile(how: bool | str) -> None:
    """Raise a ValueError if compilation cannot work, before anything is built.

    For a GPU, Triton needs a C compiler; for a CPU, torch needs one for C++. Both need the headers of Python.
    """
    if not how:
        return
    on_gpu = torch.cuda.is_available()
    if how == "graphs" and not on_gpu:
        raise ValueError("compile=graphs records CUDA graphs, but there is no GPU here: write compile=true")
    variable, usual = ("CC", ["gcc", "clang"]) if on_gpu else ("CXX", ["g++"])
    compilers, header = [os.environ[variable]] if variable in os.environ else usual, python_header()
    found = any(map(shutil.which, compilers))
    if not found or not header.exists():
        lacking = f"{header} (python3-dev)" if found else f"the compiler {' or '.join(compilers)}"
        raise ValueError(f"compile={str(how).lower()} needs {lacking}: install it or leave compile out")


def refuse_graph(records: bool) -> None:
    if records and not torch.cuda.is_available():
        raise ValueError("redundancy.graph=true records a CUDA graph, but there is no GPU here: leave it out")


def python_header() -> Path:
    return Path(sysconfig.get_path("include"), "Python.h")


def too_small(device: torch.device) -> str:
    """Return the error message for a device that ran out of memory."""
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.max_memory_reserved(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))
    return (
        f"{gpu_name(device)} has {total / GIB:.1f} GiB: this run took up to {ours / GIB:.1f}, others hold "
        f"{others / GIB:.1f}, and more was needed; lower batch_size, write precision=bf16, or use more GPUs"
    )


def gpu_name(device: torch.device) -> str:
    return f"GPU {device.index} ({torch.cuda.get_device_name(device)})"
