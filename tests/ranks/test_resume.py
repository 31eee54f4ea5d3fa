"""An interrupted run that is started again equals one that was not, and a run is never overwritten."""

import dataclasses
import itertools
import json
import shutil

import pytest
import torch

from dicedist import trainer as train_module
from dicedist.cluster import signals
from dicedist.data import sources
from dicedist.evaluation import readings
from dicedist.runs import checkpoint
from dicedist.runs.files import dump_checked
from dicedist.runs.run import Run
from tests.support.processes import run_ranks
from tests.support.tiny import asked_after, assert_same_run, build, failing_after, records_of, tensors_of, train


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("reference")
    assert not train(run_dir)
    return run_dir / "tiny"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after step 8, with checkpoints of steps 5 and 8."""
    run_dir = tmp_path_factory.mktemp("stopped")
    assert train(run_dir, after_step=asked_after(7))
    assert [path.name for path in checkpoint.saved(Run(run_dir / "tiny").checkpoints)] == [
        "step-00000005",
        "step-00000008",
    ]
    return run_dir / "tiny"


@pytest.fixture
def begun(tmp_path, stopped):
    """The folder of a copy of the stopped run."""
    return shutil.copytree(stopped, tmp_path / "tiny")


def test_records_of_an_undisturbed_run(reference):
    assert [(record["step"], "val/ensemble/accuracy" in record) for record in records_of(reference)] == [
        (4, False), (6, True), (8, False), (12, False), (12, True)
    ]  # fmt: skip


def test_failing_between_checkpoints_changes_nothing(tmp_path, reference):
    for step in (3, 9):
        with pytest.raises(RuntimeError, match="died"):
            train(tmp_path, after_step=failing_after(step))
    train(tmp_path)
    assert_same_run(tmp_path / "tiny", reference)


def test_stopped_after_every_step_changes_nothing(tmp_path, reference):
    while train(tmp_path, after_step=lambda trainer, done: signals.ask()):
        pass
    assert_same_run(tmp_path / "tiny", reference)


def test_stopped_during_validation_it_is_done_by_the_next_start(tmp_path, reference, monkeypatch):
    def interrupted(*arguments):
        raise signals.Stopped

    with monkeypatch.context() as patch:
        patch.setattr(readings, "read_batch", interrupted)
        assert train(tmp_path)
    assert checkpoint.newest(Run(tmp_path / "tiny").checkpoints).step == 6
    assert records_of(tmp_path / "tiny")[-1]["step"] == 4
    train(tmp_path)
    assert_same_run(tmp_path / "tiny", reference)


def test_branches_and_half_precision_continue_exactly(tmp_path):
    overrides = ("structure=branch", "precision=fp16", "max_steps=3")
    train(tmp_path / "whole", *overrides)
    assert train(tmp_path / "cut", *overrides, after_step=asked_after(1))
    train(tmp_path / "cut", *overrides)
    assert_same_run(tmp_path / "cut" / "tiny", tmp_path / "whole" / "tiny", 3)
    scales = [Run(tmp_path / name / "tiny").checkpoint().about["loss_scales"] for name in ("whole", "cut")]
    assert scales[0] == scales[1] != {}


def train_on_rank(rank, world_size, run_dir, asked_at, *overrides):
    """Only rank 0 is asked to stop, but all ranks stop."""
    after_step = asked_after(asked_at) if rank == 0 else None
    return train(run_dir, *overrides, after_step=after_step, rank=rank, world_size=world_size)


def test_another_placement_continues_the_run(tmp_path):
    overrides = ("ensemble.size=4", "max_steps=5")
    train(tmp_path / "whole", *overrides)
    for world_size, asked_at in ((5, 1), (1, 3), (3, None)):
        stopped = run_ranks(world_size, train_on_rank, world_size, tmp_path / "moved", asked_at, *overrides)
        assert stopped == [asked_at is not None] * world_size
    moved, whole = tmp_path / "moved" / "tiny", tmp_path / "whole" / "tiny"
    tensors = tensors_of(moved, 5)
    for name, value in tensors_of(whole, 5).items():
        torch.testing.assert_close(tensors[name], value, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: name + text)
    for record, expected in zip(records_of(moved), records_of(whole), strict=True):
        assert record == pytest.approx(expected, rel=1e-5, abs=1e-5)


PARTS = ("member-0.safetensors", "member-1.safetensors", "discriminator.safetensors", "manifest.json")


@pytest.mark.parametrize(
    ("name", "harm"), [*itertools.product(PARTS, ["flip"]), (PARTS[0], "truncate"), (PARTS[0], "remove")]
)
def test_the_checkpoint_before_a_damaged_one_is_used(begun, name, harm, capsys):
    damage(checkpoint.path_of(Run(begun).checkpoints, 8) / name, harm)
    assert build(begun.parent).done == 5
    assert name in capsys.readouterr().err


def damage(file, harm):
    content = bytearray(file.read_bytes())
    if harm == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()


def test_after_a_damaged_checkpoint_the_run_is_the_same(begun, reference):
    damage(checkpoint.path_of(Run(begun).checkpoints, 8) / "member-1.safetensors", "flip")
    train(begun.parent, "checkpoint.keep=1", after_step=asked_after(6))
    # No damaged one; of the older ones that from before the loss rose.
    assert [path.name for path in checkpoint.saved(Run(begun).checkpoints)] == ["step-00000005", "step-00000006"]
    train(begun.parent)
    assert_same_run(begun, reference)


def test_with_no_intact_checkpoint_the_run_is_left_alone(begun):
    for path in checkpoint.saved(Run(begun).checkpoints):
        damage(path / "member-0.safetensors", "truncate")
    with pytest.raises(ValueError, match="no intact checkpoint: .*member-0.safetensors is damaged"):
        build(begun.parent)
    assert len(checkpoint.saved(Run(begun).checkpoints)) == 2 and len(records_of(begun)) == 3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["resume=never"], "holds a run already"),
        (["method=ceb"], "another config .*method.name: dice -> ceb"),
        (["network=resnet20"], "network.name: resnet8 -> resnet20"),
        (["ensemble.size=3"], "ensemble.size: 2 -> 3"),
        (["optimizer.lr=0.05"], "optimizer.lr: paper -> 0.05"),
        (["epochs=8"], "epochs: 4 -> 8 would move every schedule"),
    ],
)
def test_another_run_is_refused(begun, overrides, told):
    before = (begun / "config.yaml").read_text()
    with pytest.raises(ValueError, match=told):
        build(begun.parent, *overrides)
    assert (begun / "config.yaml").read_text() == before


def test_what_may_change_changes(begun):
    assert build(begun.parent, "checkpoint.keep=5", "log.every_steps=2", "max_steps=9", "data.num_threads=2").done == 8
    assert "keep: 5" in (begun / "config.yaml").read_text()


def test_epochs_may_change_where_schedules_stay(tmp_path):
    train(tmp_path, "schedules.scale=false", "epochs=1")
    assert not train(tmp_path, "schedules.scale=false", "epochs=2")
    assert checkpoint.newest(Run(tmp_path / "tiny").checkpoints).step == 6


def test_other_images_are_refused(begun, monkeypatch):
    load = sources.load
    monkeypatch.setattr(
        "tests.support.tiny.sources.load",
        lambda *a, **k: dataclasses.replace(load(*a, **k), data_digest="of something else"),
    )
    with pytest.raises(ValueError, match="not those that .* was trained on"):
        build(begun.parent)


def test_must_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="resume=must, but .* has no intact checkpoint"):
        build(tmp_path, "resume=must")


def test_never_continues_after_a_restart_of_the_same_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    assert train(tmp_path, "resume=never", after_step=asked_after(1))
    with pytest.raises(ValueError, match="holds a run already"):
        build(tmp_path, "resume=never")  # started again with the same id, torchrun's default
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert build(tmp_path, "resume=never").done == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    with pytest.raises(ValueError, match="holds a run already"):
        build(tmp_path, "resume=never")


def test_a_newer_format_is_not_passed_over(begun):
    path = checkpoint.path_of(Run(begun).checkpoints, 8) / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": checkpoint.FORMAT + 1}
    del manifest["sha256"]
    path.write_text(dump_checked(manifest))
    with pytest.raises(ValueError, match="newer dicedist"):
        build(begun.parent)


def test_a_finished_run_shows_its_results(tmp_path, reference, capsys, monkeypatch):
    shutil.copytree(reference, tmp_path / "tiny")
    monkeypatch.setattr(train_module, "printed", lambda result, verbose: f"the table of {result}")
    Run(tmp_path / "tiny").write_result({"what": "results"})
    records = (tmp_path / "tiny" / "metrics.jsonl").read_text()
    build(tmp_path).train_and_evaluate()
    told = capsys.readouterr().out
    assert "is finished, after 12 steps" in told and "the table of {'what': 'results'}" in told
    assert (tmp_path / "tiny" / "metrics.jsonl").read_text() == records


def test_a_run_that_goes_on_sets_the_results_of_fewer_steps_aside(tmp_path, monkeypatch):
    train(tmp_path, "max_steps=2")
    Run(tmp_path / "tiny").write_result({"step": 2})
    monkeypatch.setattr(train_module.Trainer, "evaluate", lambda self: None)
    build(tmp_path, "max_steps=3").train_and_evaluate()
    assert Run(tmp_path / "tiny").result() is None
    assert Run(tmp_path / "tiny").variation("step-2").result() == {"step": 2}
