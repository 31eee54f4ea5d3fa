"""Runs in a bucket: sent while they train, continued where the disk is gone, read by their URL."""

import json
import shutil

import pytest

import dicedist
from dicedist import clean, report, trainer
from dicedist.cluster import signals
from dicedist.cluster.process import Unsent
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.data.prepared import home
from dicedist.runs import copies, resume, uploads
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import MANIFEST
from dicedist.runs.files import dump_checked
from dicedist.runs.run import Run
from dicedist.training.ledger import Ledger
from tests.support.servers import CREDENTIALS
from tests.support.tiny import STEPS, assert_same_run

# 12 steps of small layers on vectors: what is looked at here are files.
SETTINGS = [
    "data=wine", "data.train_limit=48", "batch_size=16", "network=mlp", "network.width=16", "ensemble.size=2",
    "epochs=4", "log.every_steps=4", "checkpoint.every_steps=5", "evaluate.every_epochs=2", "evaluate.test=false",
    "redundancy.num_steps=1", "run.name=tiny", "tracking=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder / "tiny"


@pytest.fixture
def remote(between, tmp_path):
    return f"s3://runs/{tmp_path.name}"


def train(folder, *overrides, stop_after=None, monkeypatch=None):
    """Train as the command does; return whether it was stopped."""
    signals._asked = False
    if stop_after is not None:
        add = Ledger.after_step
        asking = lambda self, done, outcome: (add(self, done, outcome), done == stop_after and signals.ask())  # noqa: E731
        monkeypatch.setattr(Ledger, "after_step", asking)
    try:
        trainer.train(compose_config([*SETTINGS, f"run.dir={folder}", *overrides]))
    except signals.Stopped:
        return True
    finally:
        signals._asked = False
        if stop_after is not None:
            monkeypatch.setattr(Ledger, "after_step", add)
    return False


def steps_in(url):
    bucket = Bucket.at(url, url)
    return sorted(copies.manifests(bucket, bucket.listed()))


def test_continues_without_its_disk(tmp_path, remote, undisturbed, monkeypatch, capfd):
    assert train(tmp_path / "a", f"run.remote={remote}", stop_after=7, monkeypatch=monkeypatch)
    assert steps_in(f"{remote}/tiny")[-1] == 8  # ranks agree a step later
    shutil.rmtree(tmp_path / "a")
    train(tmp_path / "b", f"run.remote={remote}", "ensemble.size=auto")  # as many members as it had
    assert "continues after step 8" in capfd.readouterr().out
    assert_same_run(tmp_path / "b" / "tiny", undisturbed)
    bucket = Bucket.at(f"{remote}/tiny", "")
    for name in ("metrics.jsonl", "config.yaml", "report.html"):
        assert bucket.read(name, 10**7) == (tmp_path / "b" / "tiny" / name).read_bytes()
    *others, last = steps_in(f"{remote}/tiny")
    assert last == STEPS and len(others) <= 2  # one before it, and one from before the loss rose
    assert not [name for name in bucket.listed() if name.startswith((".lease", ".probe"))]
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "b").rglob("*") if path.is_file())
    assert not any(secret in everything for secret in [*CREDENTIALS.values()][:2])


def test_the_disk_or_the_bucket_whichever_is_ahead(tmp_path, undisturbed, monkeypatch):
    remote = f"file://{tmp_path}/bucket"
    assert train(tmp_path / "a", f"run.remote={remote}", stop_after=3, monkeypatch=monkeypatch)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert train(tmp_path / "b", f"run.remote={remote}", stop_after=8, monkeypatch=monkeypatch)
    shutil.rmtree(tmp_path / "bucket" / "tiny" / "checkpoints" / "step-00000005", ignore_errors=True)
    train(tmp_path / "a", f"run.remote={remote}")  # whose disk is at 4, the bucket at 9
    assert_same_run(tmp_path / "a" / "tiny", undisturbed)
    with pytest.raises(ValueError, match=r"file://.*tiny was trained with another config \(seed: 0 -> 1"):
        train(tmp_path / "c", f"run.remote={remote}", "seed=1")
    with pytest.raises(ValueError, match="holds a run already: choose another run.name, or leave out resume=never"):
        train(tmp_path / "c", f"run.remote={remote}", "resume=never")
    assert not (tmp_path / "c" / "tiny" / "checkpoints").exists()


def test_faults_do_not_stop_training_and_the_end_tells(tmp_path, remote, between, undisturbed, monkeypatch, capfd):
    monkeypatch.setattr(uploads, "LIMIT", 2.0)
    monkeypatch.setattr(Ledger, "after_step", after(3, Ledger.after_step, lambda: between.behave("full")))
    try:
        with pytest.raises(Unsent, match="is complete, but s3://.* has not received all of it; the same command sends"):
            train(tmp_path, f"run.remote={remote}")
    finally:
        between.behave("well")
    told = capfd.readouterr().err
    assert told.count("could not be sent to") == 1 and "no room is left" in told and "secret-of-tests" not in told
    assert_same_run(tmp_path / "tiny", undisturbed)
    assert steps_in(f"{remote}/tiny") == []
    train(tmp_path, f"run.remote={remote}")
    assert STEPS in steps_in(f"{remote}/tiny")


def test_recovers_within_the_run(tmp_path, remote, between, undisturbed, monkeypatch):
    monkeypatch.setattr(uploads, "PAUSES", (0.1, 0.5))
    harm, heal = (lambda how=how: between.behave(how) for how in ("cut", "well"))
    monkeypatch.setattr(Ledger, "after_step", after(9, after(4, Ledger.after_step, harm), heal))
    try:
        train(tmp_path / "a", f"run.remote={remote}")
    finally:
        between.behave("well")
    shutil.rmtree(tmp_path / "a")
    train(tmp_path / "b", f"run.remote={remote}")
    assert_same_run(tmp_path / "b" / "tiny", undisturbed)


def after(step, add, act):
    def acting(self, done, outcome):
        add(self, done, outcome)
        if done == step:
            act()

    return acting


def test_damaged_and_hostile_buckets(tmp_path, undisturbed, monkeypatch, capfd):
    remote, bucket = f"file://{tmp_path}/bucket", tmp_path / "bucket" / "tiny"
    assert train(tmp_path / "a", f"run.remote={remote}", stop_after=8, monkeypatch=monkeypatch)
    part = bucket / "checkpoints" / "step-00000009" / "member-0.safetensors"
    part.write_bytes(bytes(len(part.read_bytes())))
    train(tmp_path / "b", f"run.remote={remote}")
    assert "member-0.safetensors is damaged" in capfd.readouterr().err
    assert_same_run(tmp_path / "b" / "tiny", undisturbed)
    (newest,) = [path for path in (bucket / "checkpoints").glob(f"*{STEPS}")]
    manifest = json.loads((newest / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"]["../../evil"] = {"size": 1, "sha256": ""}
    (newest / MANIFEST).write_text(dump_checked(manifest))
    (newest / "../../evil").write_bytes(b"x")
    for path in (bucket / "checkpoints").glob("*"):
        if path != newest:
            shutil.rmtree(path)
    with pytest.raises(ValueError, match="has no intact checkpoint"):
        train(tmp_path / "c", f"run.remote={remote}")
    assert "names '../../evil', which is no file of this folder" in capfd.readouterr().err
    assert not [*tmp_path.glob("c/**/evil")]


def test_read_by_its_url(tmp_path, remote, between, fresh_home, monkeypatch, capsys):
    train(tmp_path / "a", f"run.remote={remote}", "evaluate.test=true", "max_steps=3")
    local, read = dicedist.Run.open(tmp_path / "a" / "tiny"), dicedist.Run.open(f"{remote}/tiny")
    assert read.records() == local.records() and read.results == local.results and read.name == "tiny"
    assert not [*read.checkpoints.glob("*")]  # not before it is asked for
    ensemble = dicedist.Ensemble.load(f"{remote}/tiny")
    assert ensemble.about.step == 3 and read.checkpoint().step == 3
    assert read.directory.is_relative_to(home())
    report.run([remote, f"output={tmp_path / 'page.html'}"])
    assert "tiny" in (tmp_path / "page.html").read_text()
    train(tmp_path / "a", f"run.remote={remote}", "max_steps=5")
    again = Run.open(f"{remote}/tiny")
    assert again.result() is None and again.checkpoint().step == 5  # the results of fewer steps were set aside
    assert again.variation("step-3").result() is not None
    clean.run(["--yes", "data", str(tmp_path)])
    assert not again.directory.exists()
    for url, told in ((f"{remote}/none", "is not a run: it has no config.yaml"), ("s3://none/x", "does not exist")):
        with pytest.raises(ValueError, match=told):
            Run.open(url)


def test_pairs_that_were_measured_are_known_by_the_run():
    saved, asked, other = (compose_config([f"redundancy.max_pairs={pairs}"]) for pairs in (3, "auto", 2))
    saved = resume.Saved(saved, Plan.of(saved, 4, (3, 32, 32)))
    resume.refuse_foreign(saved, asked, "s3://runs/tiny", begun=True)
    with pytest.raises(ValueError, match=r"redundancy.max_pairs: 3 -> 2"):
        resume.refuse_foreign(saved, other, "s3://runs/tiny", begun=True)


def test_what_a_config_says_decides_nothing(tmp_path, monkeypatch, capfd):
    """A run that came from elsewhere names a bucket: nothing is sent there, nothing is read from there."""
    assert train(tmp_path / "a", f"run.remote=file://{tmp_path}/bucket", stop_after=3, monkeypatch=monkeypatch)
    shutil.rmtree(tmp_path / "bucket")
    train(tmp_path / "a", "max_steps=5")
    assert not (tmp_path / "bucket").exists()
    assert f"was also kept in file://{tmp_path}/bucket, and is not now" in capfd.readouterr().err
    assert Run(tmp_path / "a" / "tiny").config().run.remote is None


def test_a_folder_that_is_not_there_yet_is_no_loss(tmp_path):
    """The thread may look before the training has written its config; later a missing folder is an error."""
    config = compose_config([*SETTINGS, f"run.dir={tmp_path}", f"run.remote=file://{tmp_path}/bucket"])
    sender = uploads.Uploads(Run.of(config), Bucket.of(config), config, warn=print)
    sender.bring()
    sender.run.directory.mkdir()
    sender.run.save_config(config)
    sender.bring()
    shutil.rmtree(sender.run.directory)
    with pytest.raises(FileNotFoundError, match="was removed, or renamed"):
        sender.bring()
    sender.lease.release()
