"""`python -m dicedist.bench` at a small size: the tables, not the figures."""

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dicedist import bench
from dicedist.benchmarks import discriminator, launches
from dicedist.benchmarks.processes import run_ranks
from dicedist.benchmarks.timing import compare
from dicedist.config import compose_config

SMALL = ("network=resnet8", "data=shapes", "batch_size=8")


def apart(folder, name):
    """In a process with torch's default number of threads."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "dicedist.bench", name, *SMALL]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"bench-{name}.json").read_text())["rows"], done.stdout


def test_the_phases_of_a_step_make_up_the_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.run(["step", *SMALL])
    rows, printed = json.loads(Path("bench-step.json").read_text())["rows"], capsys.readouterr().out
    seconds = {row["seconds"]: row["rank 0"] for row in rows}
    others = ("images/s of a member", "whole step", "step that nobody watches", "processor time of it")
    speed, whole, plain, busy = (seconds.pop(name) for name in others)
    assert sum(seconds.values()) == pytest.approx(whole)
    assert speed == pytest.approx(8 / plain) and 0 < busy < 8 * plain
    assert all(0 < seconds[name] < whole for name in ("encode", "backward", "optimizer", "redundancy", "learn"))
    assert seconds["wait"] < 0.01 * whole
    assert "images/s of a member" in printed


@pytest.mark.parametrize(
    ("name", "reference", "names"),
    [
        ("cost", "method=ind", ["bare PyTorch loop, independent", "method=ind", "method=dice", "DICE written plainly"]),
        ("discriminator", "ours", ["ours", "literal"] * 3),
    ],
)
def test_what_is_compared_runs_in_processes_of_its_own(tmp_path, name, reference, names):
    rows, _ = apart(tmp_path, name)
    assert [row[""] for row in rows] == names
    assert all(row["seconds"] > 0 and row[f"times {reference}"] > 0 for row in rows)
    assert {row[f"times {reference}"] for row in rows if row[""] == reference} == {1}


def test_a_step_launches_no_more_than_it_did():
    """For ResNet-32: a member's forward, backward and update, and all work of w with four learning steps."""
    rows = {row["span"]: row for row in launches.launches(compose_config(["ensemble.size=2", "batch_size=8"]))}
    assert sum(rows[span]["of a member"] for span in launches.BY_MEMBERS) <= 280
    assert rows["redundancy"]["operations"] + rows["learn"]["operations"] <= 400
    assert rows["whole step"]["operations"] == sum(row["operations"] for row in rows.values()) / 2


def test_the_memory_is_read_in_place_and_copied(monkeypatch):
    monkeypatch.setattr(discriminator, "LARGE", (3, 20, 8))
    rows = discriminator.memory(compose_config(SMALL))
    assert [(row[""], row["classes"]) for row in rows] == [("in place", 20), ("copied", 20)]
    assert all(row["seconds"] > 0 for row in rows)


def test_a_side_that_fails_ends_the_comparison(capfd):
    with pytest.raises(RuntimeError, match="theirs ended by itself"):
        compare({"ours": lambda: None, "theirs": lambda: 1 / 0}, "ours", 1, theirs=["theirs"])
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_rank_that_dies_is_named():
    with pytest.raises(RuntimeError, match="rank 1: it died without an answer, with exit code 1"):
        run_ranks(2, die_on_rank, 1)


def die_on_rank(rank, victim):
    if rank == victim:
        os._exit(1)
    return rank


def test_no_rank_is_left_behind():
    """When the time of whoever waits for the ranks is up, as that of a test may be."""

    def time_is_up(number, frame):
        raise TimeoutError

    known = set(multiprocessing.active_children())  # of other tests
    before = signal.signal(signal.SIGUSR1, time_is_up)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(TimeoutError):
            run_ranks(2, wait_for_ever)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    deadline = time.monotonic() + 10
    while (left := set(multiprocessing.active_children()) - known) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def wait_for_ever(rank):
    faulthandler.disable()  # where this rank was is of no interest here
    time.sleep(3600)
