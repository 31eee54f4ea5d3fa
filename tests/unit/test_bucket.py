"""A bucket that answers badly, and the lease on it: what is there is known, and belongs to one training at a time."""

import hashlib
import json
import subprocess
import sys
import threading
import time

import pytest

from dicedist.config import compose_config
from dicedist.runs import lease as leases
from dicedist.runs.bucket import Bucket, Unreachable
from dicedist.runs.lease import Lease, Lost
from tests.support.servers import CREDENTIALS


@pytest.fixture(params=["file", "s3"])
def bucket(request, tmp_path):
    if request.param == "file":
        return Bucket.at(f"file://{tmp_path}/runs/tiny", "run.remote")
    return Bucket.at(f"s3://runs/{tmp_path.name}/tiny", "run.remote") if request.getfixturevalue("between") else None


@pytest.fixture
def hurried(monkeypatch):
    """Signs of life come often. How long one may be silent is as usual: this machine may be busy."""
    for name, seconds in (("BEAT", 0.1), ("LOOK", 0.05)):
        monkeypatch.setattr(leases, name, seconds)


@pytest.fixture
def brief(hurried, monkeypatch):
    monkeypatch.setattr(leases, "TERM", 1.0)


def test_files(bucket, tmp_path):
    (tmp_path / "part").write_bytes(b"x" * 1000)
    bucket.write("a/b.json", b"{}")
    bucket.send(tmp_path / "part", "part", sha256=hashlib.sha256(b"x" * 1000).hexdigest())
    assert {name: state[0] for name, state in bucket.listed().items()} == {"a/b.json": 2, "part": 1000}
    assert bucket.read("a/b.json", 100) == b"{}" and bucket.read("none", 100) is None
    with pytest.raises(ValueError, match="more than the 10 bytes"):
        bucket.read("part", 10)
    with pytest.raises(ValueError, match="has fewer than its 1,001 bytes"):
        bucket.take("part", tmp_path / "copy", 1001)
    with pytest.raises(ValueError, match="has more than its 999 bytes"):
        bucket.take("part", tmp_path / "copy", 999)
    bucket.remove(["part", "never was there"])
    assert [*bucket.listed()] == ["a/b.json"]


@pytest.mark.parametrize(
    ("manner", "told"),
    [
        ("broken", "Internal Server Error"),
        ("full", "no room is left"),
        ("cut", "came back other than it was sent"),
        ("flipped", "came back other than it was sent"),
        ("gone", "Could not connect"),
    ],
)
def test_what_does_not_arrive_is_noticed(manner, told, between):
    bucket = Bucket.at(f"s3://runs/{manner}", "run.remote")
    between.behave(manner)
    try:
        with pytest.raises(Unreachable, match=told) as caught:
            bucket.write("file", b"content" * 100)
    finally:
        between.behave("well")
    assert not any(secret in str(caught.value) for secret in list(CREDENTIALS.values())[:2])
    bucket.write("file", b"content" * 100)
    assert bucket.read("file", 1000) == b"content" * 100


def test_refusals_are_one_line(between, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="run.remote=s3://none cannot be written: .* bucket does not exist"):
        Bucket.at("s3://none/tiny", "run.remote=s3://none").refuse_unwritable("run.remote=s3://none")
    monkeypatch.setattr(Bucket, "write", refuse_by_permission)
    with pytest.raises(ValueError, match="run.remote=X cannot be written: .*not yours"):
        Bucket.at(f"file://{tmp_path}", "run.remote=X").refuse_unwritable("run.remote=X")
    with pytest.raises(ValueError, match=r"needs a package .* pip install 'dicedist\[gs\]'"):
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        Bucket.at("gs://runs/tiny", "run.remote=gs://runs")
    monkeypatch.setattr("dicedist.data.remote.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run.remote=s3://runs needs fsspec: pip install 'dicedist\[s3\]'"):
        Bucket.at("s3://runs/tiny", "run.remote=s3://runs")


def refuse_by_permission(bucket, name, content):
    with bucket.asked():
        raise PermissionError("not yours")


@pytest.mark.parametrize(
    ("remote", "told"),
    [
        ("s3://key:secret@runs", "run.remote holds a password"),
        ("s3://runs?sig=secret", "run.remote holds a password"),
        ("runs", "write s3://BUCKET/FOLDER"),
        ("https://example.org/runs", "write s3://BUCKET/FOLDER"),
    ],
)
def test_what_may_not_stand_in_a_config(remote, told):
    with pytest.raises(ValueError, match=told) as caught:
        compose_config([f"run.remote='{remote}'"])
    assert "secret" not in str(caught.value)


def test_lease_of_the_living(bucket, hurried, monkeypatch):
    owner, other = Lease(bucket), Lease(bucket)
    owner.take()
    monkeypatch.setattr(time, "time", lambda: 4e9)  # a clock that jumps concerns nobody
    with pytest.raises(ValueError, match=r"tiny is in use by process \d+ on .*: wait for it, or choose another"):
        other.take()
    owner.release()
    other.take()
    other.release()
    assert bucket.listed() == {}


def test_lease_of_the_dead(bucket, brief):
    owner, other = Lease(bucket), Lease(bucket)
    owner.renew = lambda: None  # as if it were suspended, or cut off
    owner.take()
    began = time.monotonic()
    other.take()
    assert time.monotonic() - began > leases.TERM
    other.confirm()
    with pytest.raises(Lost, match="was taken over by process"):
        owner.confirm()
    owner.release()  # takes nothing away from the other
    other.confirm()
    assert owner.lost and not other.lost


def test_owner_that_ended_on_this_machine_is_not_waited_for(bucket, hurried):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = Lease(bucket)
    owner.about["pid"] = ended.pid
    owner.renew = lambda: None
    owner.take()
    began = time.monotonic()
    Lease(bucket).take()
    assert time.monotonic() - began < leases.TERM
    elsewhere = {**owner.about, "machine": "another kernel"}
    assert not leases.ended(elsewhere)  # its numbers of processes say nothing here


def test_only_one_of_many_takes_it(bucket, hurried):
    taken, leasers = [], [Lease(bucket) for _ in range(4)]

    def take(one):
        try:
            one.take()
            taken.append(one)
        except ValueError:
            pass

    threads = [threading.Thread(target=take, args=(one,)) for one in leasers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(taken) == 1
    taken[0].release()


def test_own_lease_that_arrives_damaged_is_not_taken_for_anothers(bucket, hurried):
    owner = Lease(bucket)
    owner.renew = lambda: None
    owner.take()
    whole = bucket.read(leases.name_of(1), 1000)
    for damaged in (whole[: len(whole) // 2], whole.replace(b'"mark": "', b'"mark": "0')):
        bucket.put(leases.name_of(1), damaged)
        owner.confirm()
    bucket.put(leases.name_of(1), Lease(bucket).text())
    with pytest.raises(Lost):
        owner.confirm()


def test_damaged_lease_counts_as_one(bucket, brief):
    bucket.write(leases.name_of(3), b"[not a lease")
    taker = Lease(bucket)
    taker.take()
    assert taker.number == 4 and json.loads(bucket.read(leases.name_of(4), 1000))["mark"] == taker.about["mark"]
    taker.release()
