"""A folder that cannot be written is refused in one line with the remedy, before any slow work starts."""

import os

import pytest

from dicedist import train
from dicedist.data.prepared import refuse_unwritable
from dicedist.data.sets import cifar
from tests.support.tiny import TINY


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that belongs to someone else. os.access is patched, because permissions would not stop root."""
    folder = tmp_path / "closed"
    folder.mkdir()
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(folder) and allowed(path, mode))
    return folder


def test_a_folder_that_can_be_made_is_accepted(tmp_path, closed):
    refuse_unwritable(tmp_path / "new" / "run", "...")
    assert not (tmp_path / "new").exists()


def test_runs_are_refused_before_data_is_loaded(closed, monkeypatch):
    monkeypatch.setattr("dicedist.data.sources.load", None)
    told = (
        f"^user {os.geteuid()} cannot write to {closed}, which belongs to user {os.geteuid()}: .*write run.dir=FOLDER$"
    )
    with pytest.raises(ValueError, match=told):
        train.run([*TINY, f"run.dir={closed}"])
    with pytest.raises(ValueError, match=told):
        train.run([*TINY, f"run.dir={closed / 'new'}"])


def test_data_is_refused_before_it_is_fetched(closed):
    with pytest.raises(ValueError, match=f"cannot write to {closed}, .*put the folder cifar-100-python into {closed}"):
        cifar.prepare_cifar("cifar100", closed, download=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_entered(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ValueError, match="cannot write to .*closed, "):
        refuse_unwritable(tmp_path / "closed" / "run", "...")
