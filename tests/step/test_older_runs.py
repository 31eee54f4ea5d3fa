"""A run from before the code was divided into rooms can be loaded, evaluated, reported and continued."""

import json
import tarfile

import pytest
import torch

from dicedist import evaluate, report, train
from dicedist.runs.run import Run
from tests.support import CHECKOUT
from tests.support.tiny import records_of, tensors_of

COMMAND = [
    "data=shapes", "data.train_limit=48", "data.pipeline=torch", "batch_size=16",
    "network._target_=tests.support.networks.Small", "network.trusted=true", "ensemble.size=2", "epochs=4",
    "log.every_steps=4", "checkpoint.every_steps=5", "checkpoint.keep=1", "evaluate.every_epochs=2",
    "run.name=before-rooms", "tracking=none",
]  # fmt: skip


@pytest.fixture
def older(tmp_path):
    """Eight of twelve steps, made at commit 0ccee96."""
    with tarfile.open(CHECKOUT / "tests/support/before-rooms.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "before-rooms"


def test_its_config_gets_the_keys_that_came_later(older):
    config, plan = Run.open(older).config(), Run.open(older).plan()
    assert (config.method.name, config.method.title) == ("dice", "DICE")
    assert config.data.val_limit is None  # though it has a data.train_limit: nothing was cut then
    assert (plan.num_members, plan.input_shape, plan.samples) == (2, (3, 32, 32), 1)


def test_it_is_evaluated_and_reported_as_before(older, tmp_path):
    before = json.loads((older / "evaluation.json").read_text())
    evaluate.run([f"run={older}", f"output={tmp_path / 'again'}", "network.trusted=true"])
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again.keys() >= {*before, "step"}
    for part in ("ensemble", "ensemble_tempered", "diversity"):
        known = {name: again[part][name] for name in before[part]}  # and measures that came later
        assert known == pytest.approx(before[part], rel=1e-4, abs=1e-6), part
    report.run([str(older), f"output={tmp_path / 'report.html'}"])
    assert "DICE" in (tmp_path / "report.html").read_text()


def test_it_continues_as_if_nothing_had_changed(older, tmp_path):
    before = (older / "metrics.jsonl").read_text()
    train.run([*COMMAND, f"run.dir={tmp_path}"])
    assert (older / "metrics.jsonl").read_text().startswith(before)
    compressed_early = "bottleneck.log_beta=[[0,100],[5,10],[100,2]]"  # by default, then
    train.run([*COMMAND, compressed_early, f"run.dir={tmp_path / 'whole'}"])
    whole = tmp_path / "whole" / "before-rooms"
    continued, expected = tensors_of(older), tensors_of(whole)
    assert continued.keys() == expected.keys()
    for name in (name for name in expected if "average." not in name):  # that of w begins where the run continues
        found, tensor = continued[name], expected[name]
        torch.testing.assert_close(found, tensor, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert [record["step"] for record in records_of(older)] == [4, 6, 8, 8, 12, 12]  # it was validated after step 8
