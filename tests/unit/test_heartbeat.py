"""The rank that is blamed when a message fails, and the common end of all ranks."""

import threading
import time

import pytest

from dicedist.cluster import heartbeat
from dicedist.cluster.heartbeat import Heartbeat
from dicedist.cluster.process import MessageFailed


class Store(dict):
    """The part of torch's store that a heartbeat needs."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


@pytest.fixture
def watched(monkeypatch):
    """A function that makes a fast heartbeat of rank 0 of 3; returns it and the list of its ends."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr(heartbeat, "MISSED", 0.4)
    beating, ends = [], []

    def make(timeout=60.0):
        names = ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]
        beating.append(Heartbeat(Store(), 0, names, "node0", timeout, lambda *e: ends.append(e)))
        return beating[-1], ends

    yield make
    for one in beating:
        one.leave()


def beat(store, positions, seconds, sleep=time.sleep):
    """Writes the pulses of other ranks for some seconds."""
    for count in range(round(seconds / 0.02)):
        for rank, position in positions.items():
            store.set(f"pulse/{rank}", f"{count} {position}")
        sleep(0.02)


def test_a_store_behind_a_cut_link_is_blamed_itself(watched):
    one, _ = watched()
    answering = threading.Event()
    one.store.check = lambda keys: not answering.wait(30)
    assert one.blame() == "no answer from node0: the first node is lost, or the link to it is cut"
    answering.set()
    del one.store.check


@pytest.mark.parametrize(
    ("positions", "blamed"),
    [
        ({2: "waiting"}, "rank 1 (b) is gone"),
        (
            {1: "waiting", 2: "resnet.forward"},
            "rank 2 (c) has done no work for ",
        ),
    ],
)
def test_who_is_blamed(watched, positions, blamed, monkeypatch):
    one, _ = watched()
    monkeypatch.setattr(heartbeat, "position", lambda thread: "waiting")
    monkeypatch.setattr(time, "sleep", lambda seconds: beat(one.store, positions, seconds))  # they beat while it waits
    assert blamed in one.blame()


def test_a_silent_rank_ends_the_others_after_the_timeout(watched):
    one, ends = watched(timeout=0.3)
    beat(one.store, {1: "waiting"}, 0.6)
    assert ends and ends[0][0].startswith("rank 2 (c) has given no sign of life for 0 s")


def test_where_one_rank_ended_the_others_follow(watched):
    one, ends = watched()
    one.store.set("ended", "75")
    beat(one.store, {}, 0.1)
    assert ends[0] == ("", 75)


def test_where_a_thread_is():
    assert heartbeat.position(-1) == "start"
    with heartbeat.between_ranks():
        assert heartbeat.position(-1) == "waiting"


def test_what_fails_between_ranks_is_a_failure_of_the_group():
    with pytest.raises(MessageFailed, match="connection reset"):
        with heartbeat.between_ranks():
            raise RuntimeError("connection reset")
    assert heartbeat.position(-1) == "start"


def test_a_group_that_works_is_not_hung_however_long_it_takes(watched):
    one, ends = watched(timeout=0.3)
    for work in range(30):  # of rank 1, while the others wait for it
        beat(one.store, {1: f"{work} readings.read", 2: "0 waiting"}, 0.04)
    assert ends == []


def test_a_group_in_which_nobody_works_is_hung_and_the_culprit_is_named(watched, monkeypatch):
    monkeypatch.setattr(heartbeat, "position", lambda thread: "waiting")
    one, ends = watched(timeout=0.3)
    beat(one.store, {1: "1 readings.read", 2: "1 waiting"}, 0.1)
    beat(one.store, {1: "2 readings.read", 2: "2 waiting"}, 1.2)
    message, code = ends[0]
    assert message.startswith("rank 1 (b) has done no work for ") and message.endswith("it is in readings.read")
    assert code == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_long_computation_is_work_as_long_as_it_uses_the_processor(watched, monkeypatch, works):
    """Rank 0 computes the measures of a large test set while the others wait."""
    monkeypatch.setattr(heartbeat, "LONGER", 1)
    one, ends = watched(timeout=0.2)
    beat(one.store, {1: "1 waiting", 2: "1 waiting"}, 0.1)
    others = threading.Thread(target=beat, args=[one.store, {1: "1 waiting", 2: "1 waiting"}, 1.0, time.sleep])
    others.start()
    with heartbeat.computing():
        while others.is_alive():
            sum(range(10_000)) if works else others.join()
    assert (ends == []) == works


def test_a_first_step_may_compile_for_longer_than_the_timeout(watched, monkeypatch):
    """The messages of the start count as work, and still nobody is hung before all ranks have ended a step."""
    monkeypatch.setattr(heartbeat, "position", lambda thread: "waiting")
    monkeypatch.setattr(heartbeat, "LONGER", 1)
    one, ends = watched(timeout=0.1)
    for work in range(3):
        beat(one.store, {1: f"{work} forecast.learn", 2: f"~{work} waiting"}, 0.04)
    beat(one.store, {1: "3 step.answer", 2: "~3 resnet.forward"}, 0.6)
    assert ends == []
    beat(one.store, {1: "4 step.answer", 2: "4 resnet.forward"}, 0.1)  # rank 2 has ended its first step
    beat(one.store, {1: "4 step.answer", 2: "4 resnet.forward"}, 1.6)
    assert ends and "has done no work" in ends[0][0]


def test_a_job_that_was_suspended_as_a_whole_goes_on(watched, monkeypatch):
    one, ends = watched(timeout=0.3)
    beat(one.store, {1: "1 a", 2: "1 b"}, 0.1)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)  # an hour has passed at once
    beat(one.store, {1: "2 a", 2: "2 b"}, 0.2)
    assert ends == []


def test_success_is_never_taken_from_the_store(watched):
    one, ends = watched()
    one.store.set("ended", "0")
    beat(one.store, {}, 0.1)
    assert ends == []
