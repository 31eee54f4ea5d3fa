"""The verdicts of doctor on machines that this test pretends to be."""

import json
from types import SimpleNamespace

import pytest
import torch

from dicedist import doctor
from dicedist.config import compose_config
from dicedist.diagnosis import examination, gpus, machine, services
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, WARNING, Finding

GIB = 2**30


@pytest.fixture
def with_gpus(monkeypatch):
    def pretend(*names, free=20 * GIB, apart=()):
        properties = [SimpleNamespace(name=name, total_memory=24 * GIB) for name in names]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 24 * GIB))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)

    return pretend


def test_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert {check().state for check in (gpus.driver, gpus.peers, gpus.nccl)} == {SKIPPED}
    assert gpus.devices(5).state == SKIPPED


def test_an_old_driver(monkeypatch):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = gpus.driver()
    assert found.state == FAILED and "driver 580 or newer" in found.remedy and "11040" in found.what


def test_one_gpu_passes_and_says_what_was_skipped(with_gpus, monkeypatch):
    """By default there are as many ranks as GPUs: one sends no messages."""
    with_gpus("A100")
    asked = []
    monkeypatch.setattr(examination, "checks", lambda *words: asked.append(words) or {})
    doctor.run(["--json"])
    monkeypatch.undo()
    with_gpus("A100")
    (_, ranks, _) = asked[0]
    checks = examination.checks(*asked[0])
    found = {name: checks[name]() for name in ("GPUs", "peer access", "messages")}
    assert ranks == 1 and {name: one.state for name, one in found.items()} == {
        "GPUs": OK, "peer access": SKIPPED, "messages": SKIPPED,
    }  # fmt: skip
    assert "one rank" in found["messages"].what


def test_enough_gpus(with_gpus):
    with_gpus("A100", "A100")
    assert gpus.devices(2).state == gpus.peers().state == OK


def test_one_gpu_for_five_ranks(with_gpus):
    with_gpus("A100")
    assert gpus.devices(5).state == FAILED and "--nproc_per_node=1" in gpus.devices(5).remedy


def test_a_gpu_in_use(with_gpus):
    with_gpus("A100", "A100", free=GIB // 2)
    assert gpus.devices(2).state == FAILED and "GPU 0, 1" in gpus.devices(2).remedy


def test_gpus_of_two_kinds(with_gpus):
    with_gpus("A100", "T4")
    assert gpus.devices(2).state == WARNING and "slowest" in gpus.devices(2).remedy


def test_a_missing_peer_link(with_gpus):
    with_gpus("A100", "A100", apart=[(0, 1)])
    assert gpus.peers().state == WARNING and "0->1" in gpus.peers().remedy


def test_no_nccl(with_gpus, monkeypatch):
    with_gpus("A100", "A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: torch._C._nccl_of_another_build())
    assert gpus.nccl().state == FAILED and "torch's own wheel" in gpus.nccl().remedy
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    assert gpus.nccl().state == OK and gpus.nccl().what == "version 2.30.4"


def test_dali_decodes():
    pytest.importorskip("nvidia.dali", reason="DALI has wheels for Linux only")
    assert gpus.dali().state == OK


def test_small_shared_memory(with_gpus, monkeypatch):
    with_gpus("A100", "A100")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert machine.shared_memory(2).state == FAILED and "--shm-size" in machine.shared_memory(2).remedy


def test_threads_that_fight(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert machine.processors(4).state == WARNING


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir"):
        machine.folder_of_runs(tmp_path / "file" / "runs")


def test_a_node_without_name_and_one_that_does_not_listen():
    assert services.reaches("no-such-host.invalid").state == FAILED
    assert services.reaches("127.0.0.1:9").state == FAILED
    assert services.reaches("127.0.0.1").state == OK


def test_ports(monkeypatch):
    monkeypatch.setattr(services.socket, "gethostname", lambda: "localhost")
    assert services.ports().state == OK

    def refuse(address, timeout):
        raise ConnectionRefusedError("as if a firewall stood between")

    monkeypatch.setattr(services.socket, "create_connection", refuse)
    assert services.ports().state == WARNING and "firewall" in services.ports().remedy


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    found = services.mlflow_store(compose_config([]))
    assert found.state == WARNING and "secret" not in found.what


def test_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr("dicedist.runs.bucket.PATIENCE", 0.0)
    assert services.bucket(compose_config([])).state == SKIPPED
    config = compose_config([f"run.remote=file://{tmp_path}/runs"])
    assert services.bucket(config).state == OK
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # the probe is gone
    (tmp_path / "file").write_text("")
    found = services.bucket(compose_config([f"run.remote=file://{tmp_path}/file/runs"]))
    assert found.state == FAILED and "cannot be written" in found.what
    monkeypatch.setattr("dicedist.data.remote.find_spec", lambda name: None)
    found = services.bucket(compose_config(["run.remote=s3://bucket/runs"]))
    assert found.state == FAILED and "pip install 'dicedist[s3]'" in found.what
    assert "bucket" in examination.checks(config, 2, [])


def test_ranks_reach_each_other():
    found = services.ranks_reach_each_other(2)
    assert found.state == OK and "gloo" in found.what


def test_a_check_that_raises_is_a_failure_and_the_others_go_on(monkeypatch, capsys):
    def broken():
        raise RuntimeError("as if the driver had crashed")

    monkeypatch.setattr(examination, "checks", lambda *_: {"GPUs": broken, "memory": lambda: Finding(OK, "enough")})
    with pytest.raises(ValueError, match="1 of 2 checks failed: GPUs"):
        doctor.run(["--json"])
    told = [(found["name"], found["state"]) for found in json.loads(capsys.readouterr().out)]
    assert told == [("GPUs", FAILED), ("memory", OK)]


def test_ranks_nodes_and_keys_may_stand_in_any_order(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(examination, "checks", lambda *words: asked.append(words) or {})
    for words in (
        ["--ranks", "3", "data=shapes", "--nodes", "a,b:1"],
        ["data=shapes", "--nodes", "a,b:1", "--ranks", "3"],
    ):
        doctor.run([*words, "--json"])
    assert [(config.data.name, ranks, nodes) for config, ranks, nodes in asked] == [("shapes", 3, ["a", "b:1"])] * 2


@pytest.mark.parametrize(
    "words", [["--ranks"], ["--ranks", "many"], ["--ranks", "0"], ["--rank", "5"], ["datta=cifar10"], ["--nodes"]]
)
def test_wrong_words_are_refused(words, monkeypatch):
    monkeypatch.setattr(examination, "checks", lambda *_: {})
    with pytest.raises(ValueError):
        doctor.run(words)
