"""The rendezvous of nodes that come and go, in threads of one process; `python -m tests.nodes` has real nodes.

Checked with torch 2.13.0, 2.14.1 and 2.15.0. On another version these tests show whether it still applies.
"""

import inspect
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters

from dicedist.cluster import elastic, launcher
from dicedist.cluster.elastic import Nodes
from dicedist.cluster.process import ATTEMPT, EXIT_USER, LAUNCHER


def test_this_torch_has_what_elastic_runs_need():
    assert elastic.why_unsupported() is None
    assert "key_prefix=_TERMINAL_STATE_SYNC_ID" in inspect.getsource(SimpleElasticAgent._exit_barrier)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda patch: patch.setitem(elastic.EXPECTED, elastic.create_handler, ["other"]),
            "create_handler takes other",
        ),
        (lambda patch: patch.setattr(elastic, "OWN_STORE", "TORCH_NO_MORE"), "TORCH_NO_MORE is not read"),
        (lambda patch: patch.delattr(elastic.agent_api, "_TERMINAL_STATE_SYNC_ID"), "agents use another last barrier"),
        (lambda patch: patch.delattr(elastic.Fixed, "is_closed"), "RendezvousHandler has other methods"),
    ],
)
def test_another_torch_is_refused_before_anything_starts(change, reason, monkeypatch, capsys):
    change(monkeypatch)
    code = launcher.main(["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "nothing.py"])
    told = capsys.readouterr().err
    assert code == EXIT_USER and told.count("\n") == 1
    assert told.startswith("dicedist: --nnodes=1:2: nodes cannot come and go with torch") and reason in told


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A function that returns the handler of another node, which meets the others at a store outside all of them."""
    monkeypatch.setenv(LAUNCHER, str(tmp_path))
    (tmp_path / "logs").mkdir()  # of torchrun, next to the exit codes of ranks
    monkeypatch.setenv(elastic.OWN_STORE, "0")
    monkeypatch.setenv(ATTEMPT, "0")  # a rendezvous sets it, and later tests are no second attempt
    monkeypatch.setattr(elastic, "SILENCE", 1.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    impatient = {"is_host": False, "last_call_timeout": 1, "keep_alive_interval": 1, "join_timeout": 30}

    def start(nnodes=(1, 2)):
        parameters = RendezvousParameters(
            elastic.BACKEND, f"127.0.0.1:{store.port}", "name", *nnodes, "127.0.0.1", **impatient
        )
        return Nodes(parameters)

    return start


def port_of(found):
    return found.bootstrap_store_info.master_port


def wait_for(condition):
    deadline = time.monotonic() + 150  # cores that other jobs keep busy have needed more than 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_node_that_joins_later_finds_the_store_of_its_round(node):
    first, second = node(), node()
    alone = first.next_rendezvous()
    assert (alone.rank, alone.world_size, os.environ[ATTEMPT]) == (0, 1, "0")
    assert first.num_nodes_waiting() == 0
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(second.next_rendezvous)
        assert wait_for(first.num_nodes_waiting) == 1
        both = [threads.submit(first.next_rendezvous).result(), joining.result()]
    assert {found.rank for found in both} == {0, 1} and {found.world_size for found in both} == {2}
    assert port_of(both[0]) == port_of(both[1]) != port_of(alone)
    assert os.environ[ATTEMPT] == "1"  # both wrote it
    ranks = TCPStore("127.0.0.1", port_of(both[0]), is_master=False)
    ranks.set("key", "value")
    assert first.use_agent_store and second.use_agent_store


def test_all_launchers_let_a_new_node_in_or_none(node):
    nodes = [node((2, 3)), node((2, 3))]
    third = node((2, 3))
    with ThreadPoolExecutor() as threads:
        list(threads.map(Nodes.next_rendezvous, nodes))
        threads.submit(third.next_rendezvous)
        wait_for(nodes[0].torchs.num_nodes_waiting)
        noticed = threads.submit(nodes[0].num_nodes_waiting)
        time.sleep(1)
        assert not noticed.done()
        assert wait_for(nodes[1].num_nodes_waiting) == noticed.result() == 1
        list(threads.map(Nodes.next_rendezvous, nodes))


def test_a_run_that_has_ended_continues_under_another_name(node):
    first = node()
    first.next_rendezvous()
    first.shutdown()
    with ThreadPoolExecutor() as threads:
        again = [found.result() for found in [threads.submit(node), threads.submit(node)]]
        assert [found.get_run_id() for found in again] == ["name.1", "name.1"]
        assert {found.world_size for found in threads.map(Nodes.next_rendezvous, again)} == {2}


def test_who_is_asked_to_stop_meets_the_others_before_leaving(node, monkeypatch):
    stopped, other = node((2, 2)), node((2, 2))
    monkeypatch.setattr(elastic, "_joined", stopped)
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(Nodes.next_rendezvous, [stopped, other]))
        leaving = threads.submit(elastic.leave)
        elastic.barrier(found[1].store, 2, elastic.LAST_BARRIER, 20)
        leaving.result(1)
    stopped.round = None
    elastic.leave()  # nobody to meet
