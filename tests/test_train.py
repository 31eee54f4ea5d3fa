"""Ranks that fail, hang or are asked to stop; who is blamed, who may use a folder, and the launcher."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch
from faults import SETTINGS, Run
from ranks import run_ranks
from tiny import assert_same_tensors, records_of, train

from dicedist import checkpoint, watch, world
from dicedist.launch import codes, worst
from dicedist.lock import locked
from dicedist.watch import Watch
from dicedist.world import EndedElsewhere


def fault_on_rank(rank, run_dir, harm):
    """What the rank raises in training when rank 1 is harmed at step 5 (the sixth)."""

    def at_step(trainer, done):
        if rank == 1 and done == 5:
            harm(trainer)

    try:
        train(run_dir, "checkpoint.every_steps=4", after_step=at_step, rank=rank, world_size=3)
    except (ValueError, EndedElsewhere) as error:
        return f"{type(error).__name__}: {error}"


def a_nan(trainer):
    with torch.no_grad():
        trainer.hosted.member(1).classifier.weight[0, 0] = float("nan")


def another_batch(trainer):
    epoch = trainer.loader.epoch
    trainer.loader.epoch = lambda *place: (replace(batch, checksum=batch.checksum ^ 1) for batch in epoch(*place))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (a_nan, "cross_entropy of member_1 became nan at step 5: lower optimizer.lr or redundancy.delta"),
        (another_batch, "member_1 is out of step with the discriminator at step 6: it saw another batch"),
    ],
)
def test_a_fault_on_one_rank_is_named_and_nothing_is_lost(tmp_path, harm, told):
    first, *others = run_ranks(3, fault_on_rank, tmp_path, harm)
    assert told in first.replace("loss of", "cross_entropy of")
    assert others == ["EndedElsewhere: ", "EndedElsewhere: "]
    assert checkpoint.newest(tmp_path / "tiny").step == 4
    assert [record["step"] for record in records_of(tmp_path / "tiny")][:1] == [4]


def train_to(rank, run_dir, step):
    train(run_dir, *SETTINGS, f"max_steps={step}", rank=rank, world_size=3)


def test_killed_then_asked_to_stop(tmp_path):
    """By the launcher on three ranks: it restarts after a kill, returns 75 after SIGTERM, and no bit has changed."""
    run = Run(tmp_path, 3, "data.pipeline=torch")  # which starts quicker than DALI
    run.start()
    run.wait_for_records(2)
    run.ranks()[1].kill()
    run.wait_for(lambda: run.told().count("a step sends") == 2)
    run.wait_for_records(6)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.told()
    assert "dicedist: rank 1 (member 1) is gone: killed, or its machine is lost\n" in run.told()
    assert "continues after step" in run.told() and "Traceback" not in run.told()
    step = checkpoint.newest(run.run).step
    assert f"stopped after step {step}, saved; the same command continues the run" in run.told()
    run_ranks(3, train_to, tmp_path / "undisturbed", step)
    undisturbed = tmp_path / "undisturbed" / "tiny"
    assert_same_tensors(run.run, undisturbed, step)
    earlier = [[record for record in records_of(path) if record["step"] < step] for path in (run.run, undisturbed)]
    assert earlier[0] == earlier[1]  # of its last step only a run that has come to its end has them all


def test_a_folder_in_use_is_refused(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*: wait for it, or choose another"):
            with locked(tmp_path / "run"):
                pass
    with locked(tmp_path / "run"):
        pass


class Store(dict):
    """As much of torch's store as a watch needs."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


@pytest.fixture
def watched(monkeypatch):
    """A function that makes the watch of rank 0 of 3, quick; and where it ends."""
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "MISSED", 0.4)
    watches, ends = [], []

    def make(timeout=60.0):
        names = ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]
        watches.append(Watch(Store(), 0, names, "node0", timeout, lambda *e: ends.append(e)))
        return watches[-1], ends

    yield make
    for one in watches:
        one.leave()


def beat(store, positions, seconds, sleep=time.sleep):
    """The pulses of other ranks for some time."""
    for count in range(round(seconds / 0.02)):
        for rank, position in positions.items():
            store.set(f"pulse/{rank}", f"{count} {position}")
        sleep(0.02)


def test_a_store_behind_a_cut_link_is_blamed_itself(watched):
    one, _ = watched()
    answering = threading.Event()
    one.store.check = lambda keys: not answering.wait(30)
    assert one.blame() == "no answer from node0 any more: the first node is lost, or the link to it is cut"
    answering.set()
    del one.store.check


@pytest.mark.parametrize(
    ("positions", "blamed"),
    [
        ({2: "exchange.transfer"}, "rank 1 (b) is gone"),
        (
            {1: "exchange.transfer", 2: "resnet.forward"},
            "rank 2 (c) did not answer within 60 s: it is in resnet.forward",
        ),
    ],
)
def test_who_is_blamed(watched, positions, blamed, monkeypatch):
    one, _ = watched()
    monkeypatch.setattr(watch, "position", lambda thread: "exchange.transfer")
    monkeypatch.setattr(time, "sleep", lambda seconds: beat(one.store, positions, seconds))  # while it waits
    assert blamed in one.blame()


def test_a_silent_rank_ends_the_others_after_the_timeout(watched):
    one, ends = watched(timeout=0.3)
    beat(one.store, {1: "exchange.transfer"}, 0.6)
    assert ends and ends[0][0].startswith("rank 2 (c) has given no sign of life for 0 s")


def test_where_one_rank_ended_the_others_follow(watched):
    one, ends = watched()
    one.store.set("ended", "75")
    beat(one.store, {}, 0.1)
    assert ends[0] == ("", 75)


def test_where_a_thread_is():
    assert watch.position(-1) == "start"


SLEEPER = """
    import sys, time
    from dicedist import signals
    signals.SAME_REQUEST = 0.2
    signals.listen()
    try:
        with signals.deferred():
            print("ready", flush=True)
            while not signals.asked():
                time.sleep(0.01)
            print("asked", flush=True)
            with signals.interruptible():
                print("not here")
    except signals.Stopped:
        print("stopped", flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_and_a_second_one_ends(number):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLEEPER)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.send_signal(number)  # the same request, forwarded by a launcher
    assert [process.stdout.readline() for _ in range(2)] == ["asked\n", "stopped\n"]
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(10) == 128 + number


LEAVER = """
    import os, threading, time
    from dicedist import world
    for _ in range(20):
        threading.Thread(target=world.leave, args=(75,)).start()
    time.sleep(30)
"""


def test_threads_that_leave_together_leave_one_code(tmp_path):
    environment = {**os.environ, world.LAUNCHER: str(tmp_path), "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LEAVER)], env=environment, timeout=120)
    assert done.returncode == 0  # to the agent: nothing to restart
    assert codes(str(tmp_path)) == [75]


def test_exit_codes_of_ranks_make_one():
    assert [worst(each) for each in ([0, 0], [75, 75], [75, 2], [1, 2, 75])] == [0, 75, 2, 1]
