"""The messages about a GPU without enough memory, with a fake torch.cuda that only returns numbers."""

import shutil
from collections import namedtuple

import pytest
import torch

from dicedist.cluster import devices, process, world
from dicedist.tracking import environment

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of 24 GiB; the free memory of each can be set."""
    free = [23 * GIB, 23 * GIB]
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda device: (free[device.index], 24 * GIB),
        "get_device_name": lambda device: "Some GPU",
        "set_device": lambda device: None,
        "current_device": lambda: 1,
        "max_memory_reserved": lambda device: 17 * GIB,
        "memory_reserved": lambda device: 16 * GIB,
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return free


def test_a_free_gpu_is_taken(gpus):
    assert devices.pick_device() == torch.device("cuda", 1)


def test_a_gpu_in_use_is_refused_with_numbers(gpus):
    gpus[1] = GIB // 2
    with pytest.raises(ValueError, match=r"GPU 1 \(Some GPU\) has 0.5 of 24.0 GiB free, other processes hold"):
        devices.pick_device()


def test_more_ranks_than_gpus_are_refused(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 ranks on this node but 2 GPUs: torchrun --nproc_per_node=2"):
        devices.pick_device()


def test_a_container_without_shared_memory_is_refused(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 2**26, 2**20))
    with pytest.raises(ValueError, match="/dev/shm has 1 MiB free, 2 ranks need 32: docker run --shm-size=1g"):
        devices.pick_device()


def test_cuda_graphs_without_a_gpu_are_refused():
    with pytest.raises(ValueError, match="compile=graphs records CUDA graphs, and there is no GPU here"):
        devices.refuse_compile("graphs")


def test_a_missing_compiler_is_named(gpus, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    devices.refuse_compile(False)
    for how, word in ((True, "true"), ("graphs", "graphs")):
        with pytest.raises(ValueError, match=f"compile={word} needs the compiler no-such-compiler: install it"):
            devices.refuse_compile(how)


def test_out_of_memory_is_one_line_with_numbers_and_no_restart(gpus):
    gpus[1] = 0
    line, code = process.explained(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"))
    assert line == (
        "GPU 1 (Some GPU) has 24.0 GiB: this run took up to 17.0, others hold 8.0, and more was needed; "
        "lower batch_size, write precision=bf16, or use more GPUs"
    )
    assert code == process.EXIT_USER


def test_figures_of_a_gpu_are_those_of_its_node(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    where = world.World(1, 2, torch.device("cuda", 1))
    figures = environment.node_figures(where)
    assert figures == {
        f"system/{where.host}/gpu_1_memory_usage_gib": 1.0,
        f"system/{where.host}/gpu_1_utilization_percentage": 93,
    }

    def hidden(device):
        raise RuntimeError("NVML cannot be loaded")

    monkeypatch.setattr(torch.cuda, "utilization", hidden)
    assert list(environment.node_figures(where)) == [f"system/{where.host}/gpu_1_memory_usage_gib"]
