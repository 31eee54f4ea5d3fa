"""The messages about a GPU without enough memory, with a fake torch.cuda that only returns numbers."""

import os
import shutil
from collections import namedtuple

import pytest
import torch

from dicedist.algorithm.objectives import Method
from dicedist.cluster import devices, exchange, process, world
from dicedist.cluster.assembly import connect
from dicedist.cluster.placement import place
from dicedist.config import compose_config
from dicedist.config.plan import Plan
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


def test_a_deterministic_run_picks_no_kernels_by_time(gpus, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    devices.pick_device()
    assert torch.backends.cudnn.benchmark
    try:
        devices.make_deterministic()
        devices.pick_device()
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_gpu_in_use_is_refused_with_numbers(gpus):
    gpus[1] = GIB // 2
    with pytest.raises(ValueError, match=r"GPU 1 \(Some GPU\) has 0.5 of 24.0 GiB free, other processes hold"):
        devices.pick_device()


def test_gpus_that_torch_cannot_use_are_refused(gpus, monkeypatch):
    """Otherwise an old driver would mean a training on the CPU."""

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    wanted = r"2 GPUs, but torch cannot use them \(.*12040.*: install NVIDIA driver 580.*CUDA_VISIBLE_DEVICES="
    with pytest.raises(ValueError, match=wanted):
        devices.pick_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.pick_device() == torch.device("cpu")


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
    with pytest.raises(ValueError, match="compile=graphs records CUDA graphs, but there is no GPU here"):
        devices.refuse_compile("graphs")


def test_a_graph_of_w_without_a_gpu_or_of_several_ranks_is_refused():
    with pytest.raises(ValueError, match="redundancy.graph=true records a CUDA graph, but there is no GPU here"):
        devices.refuse_graph(True)
    with pytest.raises(ValueError, match="write redundancy.ranks=1"):
        compose_config(["method=dice", "redundancy.graph=true", "redundancy.ranks=members"])


def test_a_missing_compiler_is_named(gpus, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    devices.refuse_compile(False)
    for how, word in ((True, "true"), ("graphs", "graphs")):
        with pytest.raises(ValueError, match=f"compile={word} needs the compiler no-such-compiler: install it"):
            devices.refuse_compile(how)


def test_compilation_for_a_gpu_needs_c_and_the_headers_of_python(gpus, monkeypatch, tmp_path):
    """docs/docker.md installs gcc. It does not install g++, which a CPU needs."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(devices, "python_header", lambda: tmp_path)
    devices.refuse_compile(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"compile=true needs the compiler g\+\+"):
        devices.refuse_compile(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "python_header", lambda: tmp_path / "Python.h")
    with pytest.raises(ValueError, match=r"compile=graphs needs .*Python.h \(python3-dev\)"):
        devices.refuse_compile("graphs")


def test_out_of_memory_is_one_line_with_numbers_and_no_restart(gpus):
    gpus[1] = 0
    line, code = process.explained(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"))
    assert line == (
        "GPU 1 (Some GPU) has 24.0 GiB: this run took up to 17.0, others hold 8.0, and more was needed; "
        "lower batch_size, write precision=bf16, or use more GPUs"
    )
    assert code == process.EXIT_USER


@pytest.mark.parametrize(
    ("endpoint", "address"), [("node0", "10.0.0.7"), ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")]
)
def test_a_node_whose_own_name_is_loopback_announces_the_address_that_others_reach(monkeypatch, endpoint, address):
    """Debian writes 127.0.1.1 for a host's own name into /etc/hosts."""
    routes = {"node0": "127.0.0.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", world.ELSEWHERE: "10.0.0.7"}
    monkeypatch.setattr(world, "source_address", routes.get)
    assert world.own_address_to(endpoint) == address


def test_groups_within_the_group_wait_as_long_as_it_does(monkeypatch):
    """torch gives a new group half an hour, after which a suspended job would end."""
    made = []
    monkeypatch.setattr(exchange.dist, "new_group", lambda ranks, timeout=None: made.append((ranks, timeout)))
    config = compose_config(["method=dice", "ensemble.size=2", "redundancy.ranks=members"])
    method, placement = Method(config.method), place(2, 2, True, ranks_of_w="members")
    where = world.World(0, 2, torch.device("cpu"))
    connect(config, method, Plan.of(config, 2, (3, 32, 32)), placement, where, 10)
    assert made == [([0, 1], world.FOREVER)] * 2


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
