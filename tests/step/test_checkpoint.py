"""Checkpoints: their files, the damage that reading refuses, and the effect of a failing disk on a run."""

import errno
import json
import os
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dicedist.algorithm.parts import Part
from dicedist.config.schema import CheckpointConfig
from dicedist.runs import checkpoint, saver
from dicedist.runs.files import dump_checked
from dicedist.runs.run import Run
from tests.support.tiny import assert_same_run, build, records_of, tensors_of, train

ABOUT = {"anything": [1, 2.5, "three"]}


def a_part(name="member-0", width=3):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, width, 3), nn.BatchNorm2d(width)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(module.parameters())
    module(torch.randn(4, 2, 5, 5)).square().sum().backward()
    optimizer.step()
    return Part(name, module, optimizer)


def save(run, step, *parts, keep=2):
    files = {}
    for part in parts:
        files |= checkpoint.write_part(checkpoint.partial(run, step), part.name, checkpoint.snapshot(part))
    checkpoint.complete(run, step, files, ABOUT, keep)


def rewrite(path, **changes):
    """Changes a manifest as someone else might: its digest fits its contents."""
    manifest = json.loads(path.read_text()) | changes
    manifest.pop("sha256")
    path.write_text(dump_checked(manifest))


def test_restored_equals_saved(tmp_path):
    part = a_part()
    save(tmp_path, 7, part)
    found = checkpoint.newest(tmp_path)
    assert found.step == 7 and found.about == ABOUT
    fresh = a_part()
    with torch.no_grad():
        for value in checkpoint.state(fresh).values():
            value.zero_()
    checkpoint.restore(found, [fresh])
    for name, value in checkpoint.state(part).items():
        restored = checkpoint.state(fresh)[name]
        assert torch.equal(restored, value) and restored.stride() == value.stride(), name


def test_training_does_not_change_a_snapshot():
    part = a_part()
    snapshot = checkpoint.snapshot(part)
    before = {name: value.clone() for name, value in snapshot.items()}
    part.optimizer.step()
    assert all(torch.equal(snapshot[name], before[name]) for name in before)


def test_the_last_few_are_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, a_part(), keep=2)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000002", "step-00000003"]


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    part = a_part()
    with torch.no_grad():
        part.module[0].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="member-0 holds values that are not finite, weights.0.weight"):
        save(tmp_path, 1, part)
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "manifest.json", ".."])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    save(tmp_path, 1, a_part())
    path = checkpoint.path_of(tmp_path, 1)
    rewrite(path / "manifest.json", files={name: {"size": 1, "sha256": ""}})
    with pytest.raises(ValueError, match="no file of this folder"):
        checkpoint.read(path)


def test_a_link_is_not_followed(tmp_path):
    save(tmp_path, 1, a_part())
    file = checkpoint.path_of(tmp_path, 1) / "member-0.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no file of this folder"):
        checkpoint.read(file.parent)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": "x"}', "[" * 100_000, '{"sha256": 1}', "\x00"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    save(tmp_path, 1, a_part())
    path = checkpoint.path_of(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is missing or damaged"):
        checkpoint.read(path)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    save(tmp_path, 1, a_part())
    path = checkpoint.path_of(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        with pytest.raises(ValueError):
            checkpoint.read(path.parent)


def test_shapes_are_compared_before_tensors_are_read(tmp_path, monkeypatch):
    save(tmp_path, 1, a_part())
    found = checkpoint.newest(tmp_path)
    for wrong in (a_part(width=5).module, nn.Linear(2, 2), nn.Sequential(nn.Conv2d(2, 3, 3))):
        with pytest.raises(ValueError, match="of another network, method or number of classes"):
            checkpoint.tensors_of(found, "member-0", wrong)
    with pytest.raises(ValueError, match="has no member-1: it is of another method or ensemble size"):
        checkpoint.restore(found, [a_part("member-1")])


def test_a_file_that_is_no_safetensors_is_an_error_of_one_line(tmp_path):
    save(tmp_path, 1, a_part())
    path = checkpoint.path_of(tmp_path, 1) / "member-0.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")  # a header that claims to be huge
    with pytest.raises(ValueError, match="member-0.safetensors is damaged"):
        checkpoint.tensors_of(checkpoint.read(path.parent, only=[]), "member-0", a_part().module)


def test_optimizer_state_of_another_shape_is_refused(tmp_path):
    part = a_part()
    tensors = checkpoint.snapshot(part) | {"optimizer.square_avg.0.bias": torch.zeros(4)}
    files = checkpoint.write_part(checkpoint.partial(tmp_path, 1), part.name, tensors)
    checkpoint.complete(tmp_path, 1, files, ABOUT, 2)
    with pytest.raises(ValueError, match="of another network"):
        checkpoint.restore(checkpoint.newest(tmp_path), [part])


def test_nothing_in_the_config_of_a_run_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")
    build(tmp_path)
    path = tmp_path / "tiny" / "config.yaml"
    plain = path.read_text()
    for value in ("${oc.env:SECRET}", "${epochs}", "${oc.decode:'1'}"):
        path.write_text(plain.replace("structure: net", f"structure: {value}"))
        with pytest.raises(ValueError, match="structure holds an interpolation"):
            Run(path.parent).config()
    path.write_text(plain.replace("structure: net", "structure: !!python/object/apply:os.getcwd []"))
    with pytest.raises(ValueError, match="missing or damaged"):
        Run(path.parent).config()
    path.write_text(plain.replace("trusted: false", "trusted: true"))
    assert Run(path.parent).config().network.trusted is False


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("reference")
    train(run_dir, "max_steps=8")
    return run_dir / "tiny"


def wait_for_writer(trainer, done=None):
    """Makes every checkpoint complete before the next one is due, however slow the machine is."""
    trainer.recorder.saver.thread.submit(int).result()


def test_training_goes_on_while_files_are_written(tmp_path, reference, monkeypatch):
    wrote, write_part = threading.Event(), checkpoint.write_part

    def slow(folder, name, tensors):
        if folder.name == ".step-00000002.partial":
            assert wrote.wait(60)
        return write_part(folder, name, tensors)

    def release(trainer, done):
        if done == 5:
            assert trainer.recorder.saver.busy and not checkpoint.saved(Run(tmp_path / "tiny").checkpoints)
            wrote.set()

    monkeypatch.setattr(checkpoint, "write_part", slow)
    train(tmp_path, "max_steps=8", "checkpoint.every_steps=2", after_step=release)
    assert_same_run(tmp_path / "tiny", reference, 8)


def test_a_full_disk_is_a_warning(tmp_path, reference, monkeypatch, capsys):
    write_part = checkpoint.write_part

    def full(folder, name, tensors):
        if folder.name == ".step-00000004.partial" and name == "member-1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_part(folder, name, tensors)

    monkeypatch.setattr(checkpoint, "write_part", full)
    train(tmp_path, "max_steps=8", "checkpoint.every_steps=2", "checkpoint.keep=9", after_step=wait_for_writer)
    assert "the checkpoint of step 4 could not be written" in (told := capsys.readouterr().err)
    assert "No space left" in told and told.count("\n") == 1
    run = tmp_path / "tiny"
    assert (
        checkpoint.path_of(Run(run).checkpoints, 2).exists()
        and not checkpoint.path_of(Run(run).checkpoints, 4).exists()
    )
    assert [*Run(run).checkpoints.glob(".*")] == []
    assert_same_run(run, reference, 8)


def test_records_wait_for_a_disk_with_room(tmp_path, reference, capsys):
    def in_the_way(trainer, done):
        if done == 3:
            trainer.tracker.run = Run(tmp_path / "nowhere")
        elif done == 7:
            trainer.tracker.run = Run(tmp_path / "tiny")

    train(tmp_path, "max_steps=8", after_step=in_the_way)
    assert capsys.readouterr().err.count("records are kept in memory") == 1
    assert_same_run(tmp_path / "tiny", reference, 8)


def test_the_last_checkpoint_must_be_written(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_part", full)
    with pytest.raises(ValueError, match="the last checkpoint could not be written; make room and run this again"):
        train(tmp_path, "max_steps=1")
    monkeypatch.undo()
    assert not train(tmp_path, "max_steps=1")


def test_weights_that_broke_after_the_last_loss_are_not_saved(tmp_path):
    def break_one(trainer, done):
        wait_for_writer(trainer)
        if done == 4:
            with torch.no_grad():
                trainer.hosted.member(1).classifier.weight[0, 0] = float("nan")

    with pytest.raises(ValueError, match=r"(loss|cross_entropy) of member_1 became nan at step 4: lower optimizer.lr"):
        train(tmp_path, "checkpoint.every_steps=2", after_step=break_one)
    run = tmp_path / "tiny"
    assert [path.name for path in checkpoint.saved(Run(run).checkpoints)] == ["step-00000002"]
    assert all(torch.isfinite(value).all() for value in tensors_of(run, 2).values())
    assert [record["step"] for record in records_of(run)] == [4]


@pytest.mark.parametrize(
    ("settings", "done", "due"),
    [
        ({"every_steps": 4}, 3, False),
        ({"every_steps": 4}, 9, True),
        ({"every_epochs": 2}, 19, False),
        ({"every_epochs": 2}, 20, True),
        ({"every_minutes": 1e-9}, 1, True),
        ({"every_minutes": 60.0}, 10_000, False),
        ({}, 10_000, False),
    ],
)
def test_when_a_checkpoint_is_due(tmp_path, settings, done, due):
    config = CheckpointConfig(**({"every_minutes": None, "every_steps": None, "every_epochs": None} | settings), keep=2)
    one = saver.Saver(Run(tmp_path), config, 10, [], None, 0, print)
    assert one.due(done) is due
    one.busy = True
    assert not one.due(done)


def test_a_checkpoint_that_lacks_a_file_is_not_completed(tmp_path):
    files = checkpoint.write_part(checkpoint.partial(tmp_path, 1), "member-0", checkpoint.snapshot(a_part()))
    with pytest.raises(OSError, match="member-1.safetensors is not there"):
        checkpoint.complete(tmp_path, 1, {**files, "member-1.safetensors": (1, "")}, ABOUT, 2)
    assert checkpoint.newest(tmp_path) is None


def test_no_pickle(tmp_path):
    """A file of torch.save in place of a part is an error, not code that runs."""
    save(tmp_path, 1, a_part())
    path = checkpoint.path_of(tmp_path, 1) / "member-0.safetensors"
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.tensors_of(checkpoint.read(path.parent, only=[]), "member-0", a_part().module)
    save_file({"weights.0.weight": torch.zeros(3, 2, 3, 3)}, path)
    with pytest.raises(ValueError, match="of another network"):
        checkpoint.tensors_of(checkpoint.read(path.parent, only=[]), "member-0", a_part().module)
