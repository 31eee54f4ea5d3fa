"""Results are of one checkpoint and one evaluation: what does not belong together is never used together."""

import json
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from dicedist import evaluate, export, predict, trainer
from dicedist.config import compose_config
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.loading import load_ensemble
from dicedist.library import score
from dicedist.runs import checkpoint
from dicedist.runs.files import dump_checked, save_tensors
from dicedist.runs.results import Results
from dicedist.runs.run import Run

# Small layers on vectors; the two kinds of weights differ. What is looked at here are files.
SETTINGS = [
    "data=wine", "data.train_limit=48", "data.val_fraction=0.3", "batch_size=16", "network=mlp", "network.width=16",
    "ensemble.size=2", "epochs=2", "checkpoint.every_steps=3", "optimizer.ema=0.9", "redundancy.num_steps=1",
    "run.name=tiny", "tracking=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of 6 steps with checkpoints of the steps 3 and 6."""
    return trained_in(tmp_path_factory.mktemp("trained"))


def trained_in(folder, *words):
    trainer.train(compose_config([*SETTINGS, f"run.dir={folder}", *words]))
    return folder / "tiny"


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained, tmp_path / "tiny"))


def damage(run, step):
    path = checkpoint.path_of(run.checkpoints, step) / "member-0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def temperature_of(run):
    return run.result()["calibration"]["temperature"]


def test_an_older_checkpoint_is_named_and_not_calibrated_by_the_newest(run):
    told = []
    assert load_ensemble(run, tell=told.append).about.temperature == temperature_of(run) != 1
    assert told == []
    damage(run, 6)
    ensemble = load_ensemble(run, tell=told.append)
    assert ensemble.about.step == 3 and ensemble.about.temperature == 1.0 and ensemble.about.calibration is None
    assert "step-00000006/member-0.safetensors is damaged" in told[0] and "step-00000003 is used" in told[0]
    assert "after step 6" in told[1] and "of step 3" in told[1] and "dicedist evaluate run=" in told[1]


def test_evaluating_an_older_checkpoint_leaves_newer_results(run, capsys):
    before = run.result_file.read_bytes(), run.logits_file.read_bytes()
    damage(run, 6)
    evaluate.run([f"run={run}"])
    shown = capsys.readouterr()
    assert "step-00000003 is used" in shown.err
    assert f"step 3 of {run}" in shown.out and str(run.variation("step-3").result_file) in shown.out
    assert (run.result_file.read_bytes(), run.logits_file.read_bytes()) == before
    assert run.variation("step-3").result()["step"] == 3
    told = []
    about = load_ensemble(run, tell=told.append).about
    assert about.temperature == temperature_of(run.variation("step-3")) and len(told) == 1


def test_weights_of_a_later_step_are_not_calibrated_by_an_earlier_one(run):
    """This happens after `evaluate` in the middle of a training that continues."""
    early = run.result() | {"step": 3, "checkpoint": "of step 3"}
    run.write_result(early)
    told = []
    assert load_ensemble(run, tell=told.append).about.calibration is None
    assert "was evaluated after step 3" in told[0]
    run.write_result({key: value for key, value in early.items() if key != "step"})  # another one of this step
    assert load_ensemble(run, tell=told.append).about.calibration is None


def test_readers_name_the_checkpoint(run, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 13)))
    predict.run([f"run={run}", str(tmp_path / "a.npz")])
    assert f"step 6 of {run}" in capsys.readouterr().err
    export.run([f"run={run}", "format=safetensors", f"output={tmp_path / 'a.safetensors'}"])
    assert "members [0, 1] of step 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("evaluate.weights=last",), ("evaluate.average=probabilities", "calibration.alpha=0.3", "ood.sets.x=X")]
)
def test_a_finished_run_does_what_is_asked(run, tmp_path, words):
    np.savez(tmp_path / "x.npz", x=np.zeros((8, 13)))
    before = run.result()
    trained_in(tmp_path, *(word.replace("=X", f"={tmp_path / 'x.npz'}") for word in words))
    after, config = run.result(), run.config()
    assert after["average"] == config.evaluate.average and after["calibration"]["alpha"] == config.calibration.alpha
    assert after["ood"].keys() == config.ood.sets.keys() and len(config.ood.sets) == len(words) // 3
    assert after["weights"] == ("last" if len(words) == 1 else "ema")
    assert after["ensemble"] != before["ensemble"]
    assert run.variation("step-6").result() == before


def findings(step, name, **more):
    result = {"step": step, "member_ids": [0], "average": "logits", "ood_missing": [], "ood": {name: {}}, **more}
    return Findings(result, {"logits": torch.full((1,), float(step)), f"ood.{name}": torch.zeros(2)}, {})


def test_newer_results_stay(tmp_path):
    results = Run(tmp_path)
    findings(30, "a").save(results)
    where, _ = findings(15, "b").save(results)
    assert results.result()["step"] == 30 and results.tensors(results.logits_file, results.result())["logits"] == 30
    assert str(where) == str(tmp_path / "evaluations" / "step-15") and where.result()["step"] == 15
    assert findings(40, "c").save(results)[0] is results and results.result()["step"] == 40


def test_evaluations_that_save_at_the_same_moment_lose_nothing(tmp_path):
    for attempt in range(10):
        results, failed = Results(tmp_path / str(attempt)), []
        together = threading.Barrier(4)

        def save(name, results=results, failed=failed, together=together):
            together.wait()
            try:
                findings(3, name).save(results)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=save, args=[name]) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == [] and results.result()["ood"].keys() == set("abcd")
        tensors = results.tensors(results.logits_file, results.result())
        assert {f"ood.{name}" for name in "abcd"} <= tensors.keys()


def test_files_of_different_evaluations_are_not_used_together(run, tmp_path):
    other = Results(tmp_path / "other")
    findings(6, "x").save(other)
    shutil.copy(other.logits_file, run.logits_file)
    with pytest.raises(ValueError, match="logits.safetensors is not of the evaluation .*: evaluate again"):
        run.tensors(run.logits_file, run.result())
    told = []
    assert load_ensemble(run, [0], tell=told.append).about.calibration is None  # it would be made from the logits
    assert "no calibration" in told[0]
    del (known := json.loads(run.result_file.read_text()))["files"], known["sha256"]
    run.result_file.write_text(json.dumps(known))  # as earlier versions wrote it
    assert "logits" in run.tensors(run.logits_file, run.result())


def test_results_are_set_aside_whole(run):
    save_tensors({"a": torch.zeros(1)}, run.gallery_file)  # vectors have none
    files = {path.name: path.read_bytes() for path in run.files}
    run.set_results_aside()
    assert run.result() is None
    aside = run.variation("step-6")
    assert {path.name: path.read_bytes() for path in aside.files} == files
    run.write_result({"step": 6, "second": True})
    run.set_results_aside()
    assert run.variation("step-6-2").result()["second"] and aside.result() is not None


def test_other_targets_leave_the_results_of_the_run(run):
    before = run.result_file.read_bytes()
    evaluate.run([f"run={run}", "calibration.alpha=0.3", "calibration.coverage=0.5"])
    assert run.result_file.read_bytes() == before
    beside = run.variation("alpha-0.3_coverage-0.5")
    assert beside.result()["calibration"]["alpha"] == 0.3
    evaluate.run([f"run={run}", f"calibration.alpha={run.config().calibration.alpha}"])  # its own
    assert len(run.variations) == 1


def logits_in(path, **more):
    draws = torch.Generator().manual_seed(0)
    labels, shifted = (torch.randint(4, (200,), generator=draws) for _ in "ab")
    logits = {"logits": labels, "val_logits": shifted}
    logits = {name: 3 * torch.nn.functional.one_hot(of, 4) + torch.randn(3, 200, 4) for name, of in logits.items()}
    given = {"logits": logits["logits"], "labels": labels, "val_labels": shifted, **logits} | more
    np.savez(path, **{name: values.numpy() for name, values in given.items() if values is not None})


def test_logits_with_validation_are_calibrated(tmp_path):
    path, result = tmp_path / "a.npz", tmp_path / "a-evaluation" / "evaluation.json"
    logits_in(path)
    evaluate.run([f"logits={path}", "calibration.alpha=0.2"])
    found = json.loads(result.read_text())["calibration"]
    assert found["alpha"] == 0.2 and found["source"] == "validation" and found["num_inputs"] == 200
    assert found["ood_threshold"] is None and 0.7 < found["test"]["set_coverage"] < 0.9
    logits_in(path, val_logits=None, val_labels=None)
    with pytest.raises(ValueError, match=r"a.npz holds no validation logits, .*: add val_logits \[M, V, K\]"):
        evaluate.run([f"logits={path}", "calibration.alpha=0.2"])
    evaluate.run([f"logits={path}", "calibration.alpha=0.2", "calibration.source=test"])
    assert json.loads(result.read_text())["calibration"]["source"] == "test"
    evaluate.run([f"logits={path}"])
    assert "calibration" not in json.loads(result.read_text())


def test_probabilities_in_place_of_logits_are_noticed(tmp_path, capsys):
    logits_in(tmp_path / "a.npz")
    evaluate.run([f"logits={tmp_path / 'a.npz'}"])
    assert "probabilities" not in capsys.readouterr().err
    logits_in(tmp_path / "a.npz", logits=torch.randn(3, 200, 4).softmax(2))
    evaluate.run([f"logits={tmp_path / 'a.npz'}"])
    line = "the logits look like probabilities: every row is in 0..1 and adds up to 1; give their logarithms"
    assert capsys.readouterr().err.count(line) == 1
    score(torch.randn(3, 20, 4).softmax(2), torch.zeros(20, dtype=torch.int64))
    assert capsys.readouterr().err.count(line) == 1


def test_a_checkpoint_that_training_removes_meanwhile_is_replaced_by_the_next(run, capsys, monkeypatch):
    """It is removed after it was found and before its tensors are read."""
    newest, older = checkpoint.path_of(run.checkpoints, 6), checkpoint.path_of(run.checkpoints, 3)
    aside = newest.rename(run.directory / "aside")
    tensors_of = checkpoint.tensors_of

    def pruned(found, *arguments):
        if older.exists():
            shutil.rmtree(older)
            aside.rename(newest)
        return tensors_of(found, *arguments)

    monkeypatch.setattr(checkpoint, "tensors_of", pruned)
    ensemble = load_ensemble(run)
    assert ensemble.about.step == 6 and ensemble.about.temperature == temperature_of(run)
    shutil.copytree(newest, aside)
    newest.rename(older)
    (older / "manifest.json").write_text(remanifested(older, 3))
    evaluate.run([f"run={run}"])
    assert "after step 6 of" in capsys.readouterr().out and run.result()["step"] == 6
    assert not older.exists()


def remanifested(path, step):
    manifest = json.loads((path / "manifest.json").read_text()) | {"step": step}
    del manifest["sha256"]
    return dump_checked(manifest)


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(run, tmp_path, monkeypatch):
    for module in ("evaluation.saved.sources.load", "evaluation.loading.load_ensemble"):
        monkeypatch.setattr(f"dicedist.{module}", None)
    monkeypatch.setattr("os.access", lambda path, mode: str(tmp_path / "sealed") != str(path))
    (tmp_path / "sealed").mkdir()
    logits_in(tmp_path / "a.npz")
    line = f"user .* cannot write to {tmp_path / 'sealed'}, .* or write output="
    for act in (
        lambda: evaluate.run([f"run={run}", f"output={tmp_path / 'sealed' / 'a'}"]),
        lambda: evaluate.run([f"logits={tmp_path / 'a.npz'}", f"output={tmp_path / 'sealed'}"]),
        lambda: export.run([f"run={run}", f"output={tmp_path / 'sealed' / 'a.pt2'}"]),
    ):
        with pytest.raises(ValueError, match=line):
            act()


def test_a_full_disk_is_no_fault_of_the_program(run, tmp_path, monkeypatch):
    """torch and safetensors raise errors of their own, which a launcher would take for a fault."""
    full = lambda *arguments, **more: (_ for _ in ()).throw(RuntimeError("PytorchStreamWriter failed writing file"))  # noqa: E731
    monkeypatch.setattr("torch.export.save", full)
    with pytest.raises(OSError, match=r"a.pt2 could not be written: PytorchStreamWriter failed"):
        export.run([f"run={run}", f"output={tmp_path / 'a.pt2'}"])
    before = run.result_file.read_bytes(), run.logits_file.read_bytes()
    monkeypatch.setattr("dicedist.runs.files.save_file", lambda *a: (_ for _ in ()).throw(SafetensorError("I/O error")))
    with pytest.raises(OSError, match=r"logits.safetensors could not be written: I/O error"):
        evaluate.run([f"run={run}"])
    assert (run.result_file.read_bytes(), run.logits_file.read_bytes()) == before
