"""Several nodes: what ranks compare before they start, and a run whose nodes share no folder."""

import os
import re
import socket
import sys

import pytest

from dicedist.cluster import handshake
from dicedist.cluster.launcher import limit_silence
from dicedist.config import compose_config, flatten
from tests.support.processes import run_ranks
from tests.support.tiny import STEPS, TINY, asked_after, assert_same_run, assert_same_tensors, train


def meet_on_rank(rank, overrides, versions):
    """Return what a rank with its own config and version learns, or its error."""
    handshake.code_digest = lambda: versions[rank]
    try:
        config = compose_config([*TINY, *overrides[rank]])
        return handshake.shake_hands(flatten(config), ("auto", 7)[rank], config.distributed.timeout)
    except ValueError as error:
        return str(error)


def test_ranks_learn_where_the_others_are(monkeypatch):
    own = (["run.dir=here", "data.num_threads=2"], ["run.dir=there", "data.root=/elsewhere"])
    assert run_ranks(2, meet_on_rank, own, ("a", "a")) == [([0, 0], "auto")] * 2


@pytest.mark.parametrize(
    ("overrides", "versions", "line"),
    [
        (([], []), ("a", "b"), r"rank 1 on \S+ has dicedist \S+ \(b\), rank 0 on \S+ has \S+ \(a\): install the same"),
        (([], ["epochs=5", "seed=1"]), ("a", "a"), r"rank 1 .* another config .* \(epochs: 4 -> 5; seed: 0 -> 1\)"),
    ],
)  # fmt: skip
def test_strangers_are_named_on_every_rank(overrides, versions, line):
    for told in run_ranks(2, meet_on_rank, overrides, versions):
        assert re.search(line, told), told


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_connections_of_a_launcher_have_a_limit_and_stay_open():
    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull):
        with socket.create_connection(server.getsockname()) as connection:
            before = set(os.listdir("/proc/self/fd"))
            for _ in range(3):
                limit_silence(20)
            assert set(os.listdir("/proc/self/fd")) == before
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            connection.send(b"still open")


def train_apart(rank, world_size, folder, *overrides, stop_at=None):
    """Each rank trains in its own folder, as on nodes without a shared one."""
    own = folder / f"node-{rank}"
    stopped = train(own, *overrides, after_step=stop_at and asked_after(stop_at), rank=rank, world_size=world_size)
    return stopped, sorted(path.name for path in (own / "tiny" / "checkpoints").glob("*/*"))


def train_together(rank, world_size, folder):
    return train(folder, rank=rank, world_size=world_size)


def stop_and_continue(rank, world_size, folder):
    assert train_apart(rank, world_size, folder, stop_at=6)[0]
    stopped, files = train_apart(rank, world_size, folder)
    assert not stopped
    return files


def test_without_a_shared_folder_rank_0_keeps_everything(tmp_path):
    run_ranks(3, train_together, 3, tmp_path / "shared")
    kept, *others = run_ranks(3, stop_and_continue, 3, tmp_path / "apart")
    assert {"member-0.safetensors", "member-1.safetensors", "discriminator.safetensors"} <= set(kept)
    assert others == [[], []]
    assert_same_run(tmp_path / "apart" / "node-0" / "tiny", tmp_path / "shared" / "tiny", STEPS)


def replicas_on_rank(rank, world_size, folder, stop_at):
    own = ("ensemble.replicas=2",)
    return train(folder, *own, after_step=stop_at and asked_after(stop_at), rank=rank, world_size=world_size)


def test_a_run_with_replicas_continues_as_if_it_had_not_been_stopped(tmp_path):
    run_ranks(5, replicas_on_rank, 5, tmp_path / "whole", None)
    assert run_ranks(5, replicas_on_rank, 5, tmp_path / "stopped", 6) == [True] * 5
    run_ranks(5, replicas_on_rank, 5, tmp_path / "stopped", None)
    assert_same_tensors(tmp_path / "stopped" / "tiny", tmp_path / "whole" / "tiny", STEPS)
