"""`dicedist clean` lists files that may be removed, with their sizes, and removes only what the user asks for."""

import pytest

from dicedist import clean
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from tests.support.tiny import train


@pytest.fixture
def run(tmp_path, fresh_home):
    train(tmp_path / "runs", "max_steps=8")
    return Run(tmp_path / "runs" / "tiny")


def test_it_asks_first(run, capsys, fresh_home):
    before = checkpoint.saved(run.checkpoints)
    assert len(before) == 2
    clean.run([str(run.directory.parent)])
    told = capsys.readouterr().out
    assert "step-00000005" in told and "step-00000008" not in told and "prepared/shapes" in told
    assert "MB in all; add --yes to remove it" in told
    assert checkpoint.saved(run.checkpoints) == before


def test_it_removes_what_it_is_told_to(run, capsys, fresh_home):
    clean.run(["--yes", "checkpoints", str(run.directory.parent)])
    assert [path.name for path in checkpoint.saved(run.checkpoints)] == ["step-00000008"]
    assert [*(fresh_home / "prepared").iterdir()]
    clean.run(["--yes", "data", str(run.directory.parent)])
    assert [path for path in (fresh_home / "prepared").iterdir() if path.is_dir()] == []
    clean.run([str(run.directory.parent)])
    assert capsys.readouterr().out.endswith("nothing to remove\n")


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="nowhere: write data or checkpoints, or a folder that holds runs"):
        clean.run(["nowhere"])
