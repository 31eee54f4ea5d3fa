"""Checks of the machine except its GPUs: versions, processors, memory, limits, disks."""

import os
import platform
import resource
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from dicedist.cluster.devices import LEAST_SHARED, MIB, SHARED
from dicedist.data.prepared import refuse_unwritable
from dicedist.diagnosis.finding import FAILED, WARNING, Finding, judged, stopwatch

GB = 1e9
LEAST_FILES = 4096  # descriptors: sockets between ranks, shared memory, data
LEAST_ROOM = 2 * GB
PROBE = 64 * MIB  # bytes written to measure a disk
SLOW_DISK = 50e6  # bytes/s, below which checkpoints of large ensembles take long


def versions() -> Finding:
    named = {name: version(name) for name in ("dicedist", "torch", "torchvision")}
    what = ", ".join(f"{name} {number}" for name, number in named.items())
    return judged(f"Python {platform.python_version()}, {what}, CUDA of the wheel {torch.version.cuda}")


def processors(ranks: int) -> Finding:
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    what = f"{cores} core{'s' * (cores != 1)} for {ranks} ranks, OMP_NUM_THREADS={threads or 'not set'}"
    if threads and int(threads) * ranks > cores and int(threads) > 1:
        return judged(what, "ranks that share cores slow each other down: export OMP_NUM_THREADS=1")
    return judged(what)


def memory() -> Finding:
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    remedy = "end other programs, or train fewer members at once" if free < 4 * GB else ""
    return judged(f"{free / GB:.1f} of {total / GB:.1f} GB free", remedy)


def shared_memory(ranks: int) -> Finding:
    free = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else 0
    remedy = ""
    if free < ranks * LEAST_SHARED:
        remedy = "docker run --shm-size=1g, or on Kubernetes an emptyDir with medium: Memory mounted there"
    state = FAILED if torch.cuda.is_available() and ranks > 1 else WARNING  # gloo needs no shared memory
    return judged(f"{free / MIB:,.0f} MiB free in {SHARED}", remedy, state=state)


def limits() -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = {limit: "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (files, locked)}
    remedies = [f"ulimit -n {LEAST_FILES}"] if 0 <= files < LEAST_FILES else []
    if torch.cuda.is_available() and 0 <= locked < 64 * MIB:
        remedies.append("ulimit -l unlimited, or docker run --ulimit memlock=-1 (pinned memory, InfiniBand)")
    return judged(f"{shown[files]} open files, {shown[locked]} bytes of locked memory", "; ".join(remedies))


def folder_of_runs(folder: Path) -> Finding:
    refuse_unwritable(folder, "write run.dir=FOLDER")
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    room = shutil.disk_usage(existing).free
    noise = os.urandom(PROBE)
    with tempfile.TemporaryFile(dir=existing) as file, stopwatch() as seconds:
        file.write(noise)
        file.flush()
        os.fsync(file.fileno())
        speed = PROBE / seconds()
    what = f"{folder.absolute()}: {room / GB:,.0f} GB free, writes {speed / 1e6:,.0f} MB/s"
    if room < LEAST_ROOM:
        return judged(what, "make room, or write run.dir=FOLDER", state=FAILED)
    slow = "checkpoints will be slow; write run.dir=FOLDER on another disk" if speed < SLOW_DISK else ""
    return judged(what, slow)
