"""A run is measured whole, in part, from its logits, by one rank or several; what cannot be measured gives one line."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dicedist import Ensemble, evaluate, metrics, train
from dicedist.config import compose_config, compose_request
from dicedist.config.requests import EvaluateRequest
from dicedist.evaluation import calibration, saved, tables
from dicedist.evaluation.findings import Findings
from dicedist.evaluation.redundancy import fit
from dicedist.runs.jobs import Job
from dicedist.runs.results import Results
from dicedist.runs.run import Run
from tests.support.processes import run_ranks
from tests.support.tiny import tensors_of

TINY = [
    "data=shapes",
    "network=resnet8",
    "ensemble.size=3",
    "data.train_limit=96",
    "data.test_limit=250",
    "batch_size=32",
    "epochs=1",
    "tracking=none",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three steps."""
    runs = tmp_path_factory.mktemp("runs")
    train.run([*TINY, f"run.dir={runs}", "run.name=tiny", f"ood.sets={{stripes: {stripes(runs)}, lost: null}}"])
    return runs / "tiny"


def stripes(folder):
    images = np.zeros((40, 32, 32, 3), np.uint8)
    images[:, ::4] = 255
    np.savez(folder / "stripes.npz", images=images, labels=np.zeros(40, np.int64))
    return folder / "stripes.npz"


def evaluated(finished, output, *arguments):
    evaluate.run([f"run={finished}", f"output={output}", *arguments])
    return json.loads((output / "evaluation.json").read_text())


def test_training_leaves_every_measure(finished, capsys):
    result = json.loads((finished / "evaluation.json").read_text())
    saved = load_file(finished / "logits.safetensors")
    expected = metrics.measure(saved["logits"], saved["labels"])
    assert result["ensemble"] == pytest.approx(expected["ensemble"])
    assert len(result["redundancy"]["nats_P"]) == 3 and 0 < result["redundancy"]["accuracy"] < 1
    assert set(result["ood"]["stripes"]) == {
        "max_softmax", "max_softmax_tempered", "entropy", "mutual_information", "max_logit", "energy", "knn",
        "mahalanobis", "w_only", "dice_x_w", "dice_x_w_tempered",
    }  # fmt: skip
    assert result["ood_groups"]["all"]["sets"] == ["stripes"]
    assert result["ood_missing"][0].startswith("lost: put ")
    assert sum(result["per_class"]["count"]) == len(saved["labels"])
    per_class = np.average(result["per_class"]["ensemble"], weights=result["per_class"]["count"])
    assert per_class == pytest.approx(result["ensemble"]["accuracy"])
    shown = f"{tables.accuracy_table(result)}\n{tables.calibration_table(result)}".splitlines()
    assert max(map(len, shown)) <= 80, "they fit a usual terminal"


def test_training_ends_with_a_calibration_on_validation_images(finished):
    """The kept logits give it again, and predict's ensemble has it; the test set had no part in it."""
    result, saved = json.loads((finished / "evaluation.json").read_text()), load_file(finished / "logits.safetensors")
    found, logits_MNK = result["calibration"], saved[calibration.LOGITS]
    assert found["source"] == "validation" and found["num_inputs"] == logits_MNK.shape[1] != len(saved["labels"])
    expected = metrics.fit_temperature(metrics.ensemble_logits(logits_MNK), saved[calibration.LABELS])
    assert found["temperature"] == pytest.approx(expected)
    assert Ensemble.load(finished).about.temperature == pytest.approx(expected)
    stricter = calibration.of_results(Run.open(finished), result, [0, 1, 2], "logits", {"coverage": 0.5})
    assert stricter.coverage == 0.5 and stricter.threshold > 0 and stricter.temperature == pytest.approx(expected)


def test_a_calibration_of_an_earlier_version_decides_as_it_did(finished, tmp_path, capsys):
    """It has a threshold without a guarantee, and no spreads; a new target is met by the rule of today."""
    run = shutil.copytree(finished, tmp_path / "run")
    result = json.loads((run / "evaluation.json").read_text())
    later = {"guarantee", "ood_score", "temperature_spread", "answered", "wrong", "fewest"}
    kept = {name: value for name, value in result["calibration"].items() if name not in later}
    result["calibration"] = {**kept, "threshold": 0.123}
    del result["sha256"]
    (run / "evaluation.json").write_text(json.dumps(result))
    found = Ensemble.load(run).about.calibration
    assert found["threshold"] == 0.123 and found["guarantee"] is None
    assert "5 % wrong, no guarantee" in tables.calibration_table(result)
    assert calibration.of_results(Run.open(run), result, [0, 1, 2], "logits", {"risk": 0.2}).guarantee == 0.9


def test_shifted_images_are_measured_and_kept(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    evaluate.run([f"run={run}", "shift=resolutions", "shift_limit=30", "shift_severities=[1,5]"])
    evaluate.run([f"run={run}", "shift=rotations", "shift_limit=30", "shift_severities=[3]"])
    found = json.loads((run / "evaluation.json").read_text())["shift"]
    assert found.keys() == {"resolutions", "rotations"}
    assert found["resolutions"]["mean"].keys() == {"0", "1", "5"} and found["resolutions"]["num_inputs"] == 30
    levels = found["resolutions"]["sets"]["resolution"]
    assert found["resolutions"]["mean_error"] == pytest.approx(
        1 - (levels["1"]["accuracy"] + levels["5"]["accuracy"]) / 2
    )
    assert "mCE" in capsys.readouterr().out
    assert "Error in %, mean over severities, 30 images each" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["calibration.alpha=0.0001"], "calibration.alpha=0.0001 needs 9999 calibration images"),
        (["calibration.alpha=2"], "calibration.alpha=2.0: write a number above 0 and below 1"),
        (["shift=corruptions", "shift_severities=[6]"], r"shift_severities=\[6\]: write some of"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_read(finished, words, line):
    with pytest.raises(ValueError, match=line):
        evaluate.run([f"run={finished}", *words])


def test_evaluating_again_gives_the_same(finished, tmp_path):
    again = evaluated(finished, tmp_path)
    before = json.loads((finished / "evaluation.json").read_text())
    assert again["ensemble"] == pytest.approx(before["ensemble"], rel=1e-5)
    assert again["redundancy"]["nats_P"] == pytest.approx(before["redundancy"]["nats_P"], rel=1e-4, abs=1e-5)


def test_some_members_and_the_other_average(finished, tmp_path):
    result = evaluated(finished, tmp_path, "members=[0,2]", "average=probabilities")
    saved = load_file(finished / "logits.safetensors")
    expected = metrics.measure(saved["logits"][[0, 2]], saved["labels"], "probabilities")
    assert result["member_ids"] == [0, 2]
    assert result["ensemble"] == pytest.approx(expected["ensemble"], rel=1e-4)
    whole = json.loads((finished / "evaluation.json").read_text())["redundancy"]
    pair = whole["pairs"].index([0, 2])
    assert result["redundancy"]["pairs"] == [[0, 2]]
    assert result["redundancy"]["nats_P"][0] == pytest.approx(whole["nats_P"][pair], abs=0.3)


def test_one_member_has_no_diversity_and_says_so(finished, tmp_path, capsys):
    result = evaluated(finished, tmp_path, "members=[1]")
    assert set(result["diversity"].values()) == {None}
    assert result["redundancy"] is None
    assert "one member alone has no diversity" in capsys.readouterr().out


def files_of(run):
    names = ("evaluation.json", "logits.safetensors", "gallery.safetensors")
    return {name: (run / name).read_bytes() for name in names}


def test_what_is_not_the_whole_run_goes_beside_it(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = files_of(run)
    evaluate.run([f"run={run}", "members=[0]"])
    evaluate.run([f"run={run}", "members=[0,2]", "average=probabilities", "folds=2"])
    assert files_of(run) == before
    beside = sorted(path.name for path in (run / "evaluations").iterdir())
    assert beside == ["members-0", "members-0-2_average-probabilities_folds-2"]
    assert json.loads((run / "evaluations/members-0/evaluation.json").read_text())["member_ids"] == [0]


def test_another_ood_set_is_added_to_those_that_were_measured(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dicedist.evaluation.redundancy.fit", partial(fit, num_steps=5))
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "report.html").unlink()
    np.save(tmp_path / "noise.npy", np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), np.uint8))
    evaluate.run([f"run={run}", f"ood.sets={{noise: {tmp_path / 'noise.npy'}}}", "estimator=fresh"])
    first = json.loads((run / "evaluation.json").read_text())
    assert set(first["ood"]) == {"stripes", "noise"} and len(first["redundancy_fresh"]["conditional"]["nats_P"]) == 3
    assert f"done: {run / 'report.html'}" in capsys.readouterr().out and (run / "report.html").exists()
    evaluate.run([f"run={run}"])
    again = json.loads((run / "evaluation.json").read_text())
    assert set(again["ood"]) == {"stripes", "noise"} and again["redundancy_fresh"] == first["redundancy_fresh"]
    assert {"ood.stripes", "ood.noise"} <= load_file(run / "logits.safetensors").keys()


def test_an_ood_set_can_be_dropped(tmp_path):
    assert compose_config(["data=cifar10", "ood.sets.svhn=none"]).ood.sets.keys() == {
        "cifar100", "tinyimagenet_crop", "tinyimagenet_resize", "lsun_crop", "lsun_resize", "isun",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"ood.sets.svnh=none: there is no such set \(did you mean svhn\?\)"):
        compose_config(["data=cifar10", "ood.sets.svnh=none"])
    common = {"step": 3, "member_ids": [0], "average": "logits", "ood_missing": []}
    results = Results(tmp_path)
    for name, dropped in (("old", ()), ("mistaken", ()), ("new", ("mistaken", "never there"))):
        found = Findings({**common, "ood": {name: {}}}, {f"ood.{name}": torch.zeros(2)}, {"images": torch.zeros(1)})
        found.save(results, dropped)
    assert results.result()["ood"].keys() == {"old", "new"}
    assert load_file(results.logits_file).keys() == {"ood.old", "ood.new"}
    request = compose_request("evaluate", ["run=runs/a", "ood.sets.mistaken=none", "ood.sets.b=/c"], EvaluateRequest)
    assert (request.ood.left_out, request.ood.measured) == ({"mistaken"}, {"b": "/c"})


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("lost.npz", None, "ood.sets.mine=.*lost.npz: there is no such file or folder"),
        ("text.txt", b"words", "text.txt: write a folder of images, or a file .npz or .npy"),
        ("text.npz", b"words", "text.npz: not an .npz with an array `images`, nor a .npy"),
        ("empty.npy", b"", "empty.npy: not an .npz with an array"),
    ],
)
def test_an_ood_set_that_cannot_be_read_is_refused_before_work(finished, tmp_path, monkeypatch, name, content, line):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("dicedist.data.sources.load", None)
    with pytest.raises(ValueError, match=line):
        evaluate.run([f"run={finished}", f"ood.sets.mine={tmp_path / name}"])
    with pytest.raises(ValueError, match=line):
        train.run([*TINY, f"run.dir={tmp_path / 'runs'}", f"ood.sets.mine={tmp_path / name}"])


def test_files_can_be_read_by_whom_the_umask_allows(finished):
    readable = [path for path in finished.rglob("*") if path.is_file() and path.stat().st_mode & 0o777 != 0o644]
    assert readable == []


def evaluate_on_rank(rank, world_size, finished, output):
    """`run_ranks` has already made the group, so joining it again is left out."""
    from contextlib import contextmanager

    from dicedist.cluster.world import World

    @contextmanager
    def joined(timeout):
        yield World(rank, world_size, torch.device("cpu"))

    saved.joined = joined
    saved.world_size, saved.this_rank = lambda: world_size, lambda: rank
    evaluate.run([f"run={finished}", f"output={output}"])


def test_several_ranks_give_what_one_gives(finished, tmp_path):
    run_ranks(2, evaluate_on_rank, 2, finished, tmp_path)
    several = json.loads((tmp_path / "evaluation.json").read_text())
    alone = json.loads((finished / "evaluation.json").read_text())
    assert several["ensemble"] == pytest.approx(alone["ensemble"], rel=1e-5)
    assert several["ood"]["stripes"]["dice_x_w"]["auroc"] == pytest.approx(alone["ood"]["stripes"]["dice_x_w"]["auroc"])


def test_logits_of_any_ensemble(tmp_path):
    logits, labels = torch.randn(4, 50, 7), torch.randint(7, (50,))
    np.savez(tmp_path / "theirs.npz", logits=logits.numpy(), labels=labels.numpy())
    evaluate.run([f"logits={tmp_path / 'theirs.npz'}"])
    result = json.loads((tmp_path / "theirs-evaluation" / "evaluation.json").read_text())
    assert result["ensemble"]["nll"] == pytest.approx(metrics.measure(logits, labels)["ensemble"]["nll"])


@pytest.mark.parametrize(
    ("logits", "labels", "line"),
    [
        (torch.zeros(2, 5, 3), torch.zeros(4, dtype=torch.int64), "logits are for 5 inputs"),
        (torch.full((2, 5, 3), torch.nan), torch.zeros(5, dtype=torch.int64), "member 0 gave NaN"),
        (torch.zeros(2, 5, 3), torch.full((5,), 3), "labels must be 0 to 2"),
    ],
)
def test_logits_that_cannot_be_measured(logits, labels, line, tmp_path):
    np.savez(tmp_path / "theirs.npz", logits=logits.numpy(), labels=labels.numpy())
    with pytest.raises(ValueError, match=line):
        evaluate.run([f"logits={tmp_path / 'theirs.npz'}"])


def test_folders_and_files_that_are_none(finished, tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no config.yaml"):
        evaluate.run([f"run={tmp_path}"])
    with pytest.raises(ValueError, match=r"write run=runs/NAME, or logits=FILE.npz"):
        evaluate.run([])
    (tmp_path / "logits.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not an .npz or .safetensors"):
        evaluate.run([f"logits={tmp_path / 'logits.npz'}"])
    with pytest.raises(ValueError, match="the run has members 0 to 2"):
        evaluate.run([f"run={finished}", "members=[0,7]"])
    with pytest.raises(ValueError, match="is the test set of shapes itself"):
        evaluate.run([f"run={finished}", f"ood.sets={{same: {own_test_set(tmp_path)}}}", f"output={tmp_path}"])


def own_test_set(folder):
    from dicedist.data.sets.shapes import generate

    images, labels = generate("test")
    np.savez(folder / "same.npz", images=images, labels=labels)
    return folder / "same.npz"


def test_damaged_weights_are_named(finished, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(finished, copy)
    (weights,) = copy.glob("checkpoints/*/member-1.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="no intact checkpoint: .*member-1.safetensors is damaged"):
        evaluate.run([f"run={copy}"])


def test_the_test_set_stays_unread_until_it_is_asked_for(tmp_path):
    command = [*TINY, f"run.dir={tmp_path}", "max_steps=3"]
    train.run([*command, "evaluate.test=false"])
    job = Job("tiny", (*command, "evaluate.test=false"))
    assert job.run.result() is None and job.finished and job.run.ending() == "FINISHED"
    assert not Job("tiny", tuple(command)).finished
    before = tensors_of(job.run.directory, step=3)
    train.run(command)
    assert job.run.result()["step"] == 3 and job.finished
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(job.run.directory, step=3).items())


def test_a_strangers_config_does_not_decide_where_files_are_put(finished, tmp_path):
    stranger = shutil.copytree(finished, tmp_path / "stranger")
    config = Run(stranger).config()
    data = replace(config.data, name="cifar10", root=str(tmp_path / "theirs"), download=True)
    Run(stranger).save_config(replace(config, data=data))
    with pytest.raises(ValueError, match="cifar10 is not in .*theirs"):
        evaluate.run([f"run={stranger}"])
    assert not (tmp_path / "theirs").exists()
