"""The store of a launched run: another user of the machine can neither read a secret there nor end the run."""

import os
import subprocess
import sys
import tempfile

import pytest

from dicedist.cluster import channel
from tests.support import CHECKOUT

ATTACKED = """
import os, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from dicedist.cluster import process, world

def run(arguments):
    with world.joined(20):
        time.sleep(1.5)
        if os.environ["RANK"] == "0":  # as anybody who reaches the port may
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=5))
            keys = store.list_keys()
            assert not [key for key in keys if os.environ.get("DICEDIST_SECRET", "pulse/") in key], keys
            for key in keys:
                for place in {key, *(key[:end] + "/ended" for end in range(len(key)) if key[end] == "/"), "ended"}:
                    store.set(place, "2")
        time.sleep(3)
        print("still here", flush=True)

process.command(run)
"""


def test_nobody_ends_a_run_through_the_store(tmp_path):
    (tmp_path / "attacked.py").write_text(ATTACKED)
    before = {*os.listdir(tempfile.gettempdir())}
    done = subprocess.run(
        [sys.executable, "-m", "dicedist.launch", "--nproc_per_node=2", "--max-restarts=0", tmp_path / "attacked.py"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("still here") == 2, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["attacked.py"], "a launch leaves nothing behind"
    assert not [name for name in {*os.listdir(tempfile.gettempdir())} - before if name.startswith("torchelastic_")]


@pytest.fixture
def kept():
    return channel.Keeper()


def test_the_channel_is_a_store(kept):
    one = channel.Channel(kept.name, "attempt-0", 1.0)
    other, later = one.clone(), channel.Channel(kept.name, "attempt-1", 0.2)
    one.set("pulse", "4 5 step.descend")
    other.set("file", bytes(range(256)))
    assert other.get("pulse") == b"4 5 step.descend" and one.get("file") == bytes(range(256))
    assert one.check(["pulse", "file"]) and not one.check(["pulse", "none"]) and not later.check(["pulse"])
    assert [one.add("told", 1), other.add("told", 1)] == [1, 2]
    other.delete_key("file")
    with pytest.raises(RuntimeError, match="file was not there within 1 s"):
        one.get("file")
    kept.close()
    with pytest.raises(RuntimeError, match="the launcher is gone"):
        channel.Channel(kept.name, "attempt-0", 1.0)


STRANGER = """
import os, sys
from dicedist.cluster import channel
os.setuid(65534)
try:
    channel.Channel(sys.argv[1], "attempt-0", 1.0)
except RuntimeError as error:
    print(error)
channel.is_own_user = lambda link: True  # which a stranger's program would say
try:
    channel.Channel(sys.argv[1], "attempt-0", 1.0).set("ended", "2")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(kept):
    shown = subprocess.run(
        [sys.executable, "-c", STRANGER, kept.name],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.stdout == "the launcher belongs to another user\nthe launcher is gone\n", shown.stderr
    assert not channel.Channel(kept.name, "attempt-0", 1.0).check(["ended"])
