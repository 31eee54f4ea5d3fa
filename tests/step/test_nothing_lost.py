"""Checks around the training: records, prepared images, names of checkpoints, changed keys."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dicedist.config import compose_config
from dicedist.data import sources
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from tests.support.tiny import STEPS, asked_after, assert_same_run, build, records_of, train


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    train(folder)
    return folder / "tiny"


@pytest.fixture
def stopped(tmp_path):
    assert train(tmp_path, after_step=asked_after(9))
    return Run(tmp_path / "tiny")


def test_records_that_are_removed_in_mid_run_are_written_anew(tmp_path, reference, capsys):
    def remove(trainer, done):
        if done == 6:
            trainer.run.records_file.unlink()

    train(tmp_path, after_step=remove)
    told = capsys.readouterr().err
    assert told.count("was removed or shortened: it is written again") == 1 and "could not be written" not in told
    assert_same_run(tmp_path / "tiny", reference)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(path.read_text().splitlines(keepends=True)[0]),
        lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": 3')),
    ],
)
def test_records_that_are_harmed_while_a_run_is_down_are_mended(stopped, reference, capsys, harm):
    harm(stopped.records_file)
    train(stopped.directory.parent)
    assert "removed, shortened or changed: it is mended from the checkpoint" in capsys.readouterr().err
    assert_same_run(stopped.directory, reference)


def test_a_gap_that_cannot_be_mended_is_named(stopped, capsys, monkeypatch):
    """Checkpoints of earlier versions keep no copy of the records."""
    monkeypatch.setattr(checkpoint, "unpack_records", lambda found: None)
    stopped.records_file.write_text("")
    build(stopped.directory.parent)
    assert "metrics.jsonl lacks 3 of the 3 records up to step 10" in capsys.readouterr().err


def test_checkpoints_with_swapped_names_are_not_taken(tmp_path, capsys):
    train(tmp_path, "max_steps=10")
    folder = Run(tmp_path / "tiny").checkpoints
    five, ten = (checkpoint.path_of(folder, step) for step in (5, 10))
    five.rename(tmp_path / "aside")
    ten.rename(five)
    (tmp_path / "aside").rename(ten)
    with pytest.raises(ValueError, match="holds step 5, which is not the step that it is named for"):
        build(tmp_path)


def test_a_checkpoint_of_another_run_is_not_taken(stopped, tmp_path):
    assert train(tmp_path / "other", "seed=1", after_step=asked_after(9))
    shutil.rmtree(stopped.checkpoints)
    shutil.copytree(Run(tmp_path / "other" / "tiny").checkpoints, stopped.checkpoints)
    with pytest.raises(ValueError, match="belongs to another run: .*'seed': 1"):
        build(stopped.directory.parent)


def test_prepared_images_that_changed_are_noticed(fresh_home):
    config = compose_config(["data=shapes"]).data
    sources.load(config)
    (file,) = (fresh_home / "prepared").rglob("train_images.npy")
    pixels = np.load(file, mmap_mode="r+")
    pixels[17] = 255 - pixels[17]
    pixels.flush()
    with pytest.raises(ValueError, match=r"the prepared images are damaged \(train_images.npy\); remove it .*clean"):
        sources.load(config)
    (about,) = (fresh_home / "prepared").rglob("about.json")
    about.write_text("")
    with pytest.raises(ValueError, match="about.json is damaged; remove it"):
        sources.load(config)


def test_the_description_of_prepared_images_is_verified(fresh_home):
    config = compose_config(["data=shapes"]).data
    mean = sources.load(config).mean
    (about,) = (fresh_home / "prepared").rglob("about.json")
    about.write_text(about.read_text().replace(str(mean[0]), "0.5"))
    with pytest.raises(ValueError, match="about.json is damaged; remove it"):
        sources.load(config)


@pytest.mark.parametrize("harm", [lambda text: text[:40], lambda text: text.replace("0.5", "0.6"), lambda text: "[]"])
def test_a_damaged_evaluation_is_none(tmp_path, harm):
    run = Run(tmp_path)
    run.write_result({"step": 60, "ensemble": {"accuracy": 0.5}})
    assert run.result() == run.result(60) == {"step": 60, "ensemble": {"accuracy": 0.5}}
    assert run.result(61) is None
    run.result_file.write_text(harm(run.result_file.read_text()))
    assert run.result() is None


def test_what_replaces_a_file_is_on_the_disk_first(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("fsync"))
    monkeypatch.setattr(Path, "rename", lambda path, target: order.append("rename"))
    Run(tmp_path).save_config(compose_config(["data=shapes"]))
    assert order == ["fsync", "rename", "fsync"]  # the file, its name, the folder


def test_a_key_is_changed_on_purpose_and_recorded(stopped):
    runs = stopped.directory.parent
    with pytest.raises(ValueError, match=r"optimizer.lr: paper -> 0.05.*resume.allow=\[optimizer.lr\]"):
        build(runs, "optimizer.lr=0.05")
    build(runs, "optimizer.lr=0.05", "resume.allow=[optimizer.lr]")
    assert [json.loads(line) for line in stopped.changes_file.read_text().splitlines()] == [
        {"after_step": 10, "changed": ["optimizer.lr: paper -> 0.05"]}
    ]
    build(runs, "optimizer.lr=0.05")  # from now on it is the run's
    with pytest.raises(ValueError, match="resume.allow=.*name keys that begin with optimizer."):
        build(runs, "batch_size=8", "resume.allow=[batch_size]")


def test_a_run_goes_back_to_a_checkpoint_from_before_it_diverged(tmp_path):
    often = ("checkpoint.keep=1", "log.every_steps=1", "checkpoint.every_steps=2")

    def diverge(trainer, done):
        if done == 5:
            trainer.step.schedules.learning_rate = lambda epoch: 0.7

    train(tmp_path, *often, after_step=diverge)
    run = Run(tmp_path / "tiny")
    losses = {
        one["step"]: one["train/members/loss"] for one in records_of(run.directory) if "train/members/loss" in one
    }
    limit = 2 * min(losses.values())
    first, last = (checkpoint.step_of(path) for path in checkpoint.saved(run.checkpoints))
    assert losses[STEPS] > limit and last == STEPS and losses[first] <= limit, losses
    assert build(tmp_path, f"resume.step={first}", *often).done == first
    with pytest.raises(ValueError, match="resume.step=3: .* has checkpoints of the steps "):
        build(tmp_path, "resume.step=3", *often)


def test_a_run_that_goes_back_stays_back(tmp_path, monkeypatch):
    """A rank is killed before the first new checkpoint, and the launcher starts the same command again."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    train(tmp_path, "max_steps=10")
    back = ("max_steps=10", "resume.step=5", "optimizer.lr=0.05", "resume.allow=[optimizer.lr]")
    assert build(tmp_path, *back).done == 5
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = build(tmp_path, *back)
    assert again.done == 5 and again.run.config().optimizer.lr == 0.05
    assert [checkpoint.step_of(path) for path in checkpoint.saved(again.run.checkpoints)] == [5]


def state_of(run):
    return {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file() and path.name != ".mark"}


def test_a_refused_change_leaves_no_trace(stopped):
    """The width of the class memory is a shape of w, which only the checkpoint can refuse."""
    before = state_of(stopped)
    with pytest.raises(ValueError, match="discriminator.safetensors is of another network, method"):
        build(stopped.directory.parent, "redundancy.memory=7", "resume.allow=[redundancy.memory]")
    assert state_of(stopped) == before
    build(stopped.directory.parent)


def test_a_run_whose_folder_is_renamed_saves_there_and_stops(tmp_path, reference):
    def rename(trainer, done):
        if done == 6:
            (tmp_path / "tiny").rename(tmp_path / "moved")

    line = r"tiny was renamed to .*moved while it trained: stopped after step 6, saved there; rename it back"
    with pytest.raises(ValueError, match=line):
        train(tmp_path, after_step=rename)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert Run(tmp_path / "moved").newest_checkpoint().step == 6
    (tmp_path / "moved").rename(tmp_path / "tiny")
    train(tmp_path)
    assert_same_run(tmp_path / "tiny", reference)


def test_a_run_whose_folder_is_removed_stops(tmp_path):
    def remove(trainer, done):
        if done == 6:
            shutil.rmtree(tmp_path / "tiny")

    with pytest.raises(ValueError, match="tiny was removed while it trained: stopped after step 6, nothing is saved"):
        train(tmp_path, after_step=remove)
    assert not (tmp_path / "tiny").exists()
