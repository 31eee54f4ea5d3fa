"""A run's ensemble gives the answers that its evaluation measured, for every kind of run, without the data."""

import dataclasses
import json
import shutil
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dicedist import evaluate, metrics
from dicedist.config import compose_config
from dicedist.config.schema import OodConfig
from dicedist.data import sources
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.evaluator import Evaluator
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from dicedist.runs.saver import Saver
from tests.support.tiny import train

FEW = 24  # test images
KINDS = {
    "dice": [],
    "branch": ["structure=branch"],
    "mixed": ["network.per_member=[resnet8,wrn28_2,resnet8]"],  # D differs between members
    "unconditional": ["method=ibr"],
    "ind": ["method=ind"],
    "student": ["method=okddip_dice"],
}
SHAPES = compose_config(["data=shapes"]).data
load_all = sources.load


def load_few(config, **settings):
    source = load_all(config, **settings)
    few = sources.Split(source.test.images_NHWC[:FEW], source.test.labels_N[:FEW])
    return dataclasses.replace(source, test=few)


def train_briefly(folder, *overrides):
    settings = ("ensemble.size=3", "data.split=full", "batch_size=8", "max_steps=2", "tracking=none")
    train(folder, *settings, *overrides)
    return folder / "tiny"


def evaluated(run, output, *arguments):
    """The evaluation of a few images, and the scores of each image, which evaluation keeps only as histograms."""
    scores, black, measured = [], torch.zeros(2, 32, 32, 3, dtype=torch.uint8), metrics.ood
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "load", load_few)
        patch.setattr("dicedist.evaluation.evaluator.load_ood", lambda *settings: ({"black": black}, []))
        patch.setattr(
            metrics, "ood", lambda inside_N, outside_N: scores.append(inside_N) or measured(inside_N, outside_N)
        )
        patch.setattr(Evaluator, "redundancy", lambda self, features, labels_N: None)
        patch.setattr("dicedist.evaluation.evaluator.REFERENCE", 60)
        patch.setattr("dicedist.evaluation.tables.show", lambda result: "")
        evaluate.run([f"run={run}", f"output={output}", "calibration.source=test", *arguments])
    result = json.loads((output / "evaluation.json").read_text())
    saved = load_file(output / "logits.safetensors")
    by_name = dict(zip(result["ood"]["black"], scores, strict=True))
    return SimpleNamespace(logits_MNK=saved["logits"], scores=by_name, result=result)


@pytest.fixture(scope="module", params=KINDS)
def finished(request, tmp_path_factory):
    run = train_briefly(tmp_path_factory.mktemp(request.param), *KINDS[request.param])
    return SimpleNamespace(kind=request.param, run=run, evaluation=evaluated(run, run))


@pytest.fixture(scope="module")
def dice(tmp_path_factory):
    return train_briefly(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def images():
    return load_few(SHAPES).test.images_NHWC


@torch.inference_mode()
def assert_as_evaluated(ensemble, images, evaluation):
    found = ensemble(images)
    logits_NK = metrics.ensemble_logits(evaluation.logits_MNK, evaluation.result["average"])
    temperature = evaluation.result["calibration"]["temperature"]
    labels = evaluation.logits_MNK.argmax(2)
    pairs = list(combinations(range(len(labels)), 2))
    differ = sum((labels[i] != labels[j]).float() for i, j in pairs) / max(1, len(pairs)) + torch.zeros(len(images))
    score = evaluation.scores[evaluation.result["calibration"]["ood_score"]]
    assert ensemble.about.temperature == pytest.approx(temperature)
    assert found["label"].dtype == torch.int64 and found["label"].equal(logits_NK.argmax(1))
    expected = {
        "probabilities": logits_NK.softmax(1),
        "member_logits": evaluation.logits_MNK.transpose(0, 1),
        "confidence": (logits_NK / temperature).softmax(1).amax(1),
        "disagreement": differ,
        "entropy": torch.special.entr(logits_NK.softmax(1)).sum(1),
        "mutual_information": metrics.entropies(evaluation.logits_MNK)["mutual_information"],
        "ood_score": score,
    }
    decided = assert_decided(found, (logits_NK / temperature).softmax(1), score, ensemble.about.calibration)
    assert found["member_labels"].equal(labels.T)
    assert found.keys() == {"label", "member_labels", *expected, *decided}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.float(), rtol=1e-4, atol=1e-5, msg=lambda text, n=name: n + text)


def assert_decided(found, p_NK, score_N, calibration):
    """Sets, abstention and its reason by the calibration's own numbers; the names of what was decided."""
    assert calibration["source"] == "test" and calibration["num_inputs"] == FEW
    torch.testing.assert_close(found["label_set"], 1 - p_NK <= calibration["quantiles"][0] + 1e-6)
    reason_N = (p_NK.amax(1) < calibration["threshold"] - 1e-6).long()
    decided = {"label_set", "abstain", "reason"}
    if calibration["ood_threshold"] is not None:
        reason_N[score_N < calibration["ood_threshold"] - 1e-6] = 2
        assert (found["ood_threshold"] == torch.tensor(calibration["ood_threshold"])).all()
        decided.add("ood_threshold")
    assert found["reason"].equal(reason_N) and found["abstain"].equal(reason_N > 0)
    return decided


def test_answers_what_the_evaluation_measured(finished, images, monkeypatch):
    monkeypatch.setattr(sources, "load", None)  # the data is not needed
    ensemble = load_ensemble(Run.open(finished.run))
    assert (ensemble.w is None) == (finished.kind == "ind")
    assert_as_evaluated(ensemble, images, finished.evaluation)


@pytest.mark.parametrize("name", ["dice_x_w", "energy"])
@pytest.mark.parametrize("finished", ["dice"], indirect=True)
def test_another_ood_score_is_measured_or_read_from_what_was_kept(finished, images, tmp_path, name):
    """predict calibrates the score on the logits and readings that the evaluation kept; evaluate measures it."""
    asked = {"ood_score": name}
    ensemble = load_ensemble(Run.open(finished.run), asked=asked, tell=print)
    own = evaluated(finished.run, tmp_path, f"calibration.ood_score={name}")
    assert own.result["calibration"]["ood_threshold"] == pytest.approx(ensemble.about.calibration["ood_threshold"])
    assert ensemble.bank_RMD is None and own.result["calibration"]["ood_score"] == name
    assert_as_evaluated(ensemble, images, own)


@pytest.mark.parametrize("finished", ["ind"], indirect=True)
def test_a_score_that_members_lack_is_refused_or_replaced(finished, tmp_path, capsys):
    with pytest.raises(ValueError, match="calibration.ood_score=w_only: .* does not hold this score"):
        load_ensemble(Run.open(finished.run), asked={"ood_score": "w_only"})
    own = evaluated(finished.run, tmp_path, "calibration.ood_score=dice_x_w")
    assert own.result["calibration"]["ood_score"] == "max_softmax"
    assert (
        "calibration.ood_score=dice_x_w: these members lack this score, so max_softmax is used"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("finished", ["mixed"], indirect=True)
def test_some_of_the_members_are_compared_with_their_part_of_the_bank(finished, images):
    whole = load_ensemble(Run.open(finished.run), tell=print)
    part = whole[[0, 2]]
    assert part.bank_RMD.equal(whole.bank_RMD[:, [0, 2]]) and part.about.calibration is None
    of_run = load_ensemble(Run.open(finished.run), [0, 2], tell=print)
    assert of_run.about.calibration["ood_threshold"] is None, "nobody kept how near the validation images are to them"
    with torch.inference_mode():
        torch.testing.assert_close(part(images)["ood_score"], of_run(images)["ood_score"])


@pytest.mark.parametrize("finished", ["dice", "ind"], indirect=True)
def test_results_of_an_earlier_version_answer_with_its_score(finished, images, tmp_path):
    run = shutil.copytree(finished.run, tmp_path / "run")
    result = json.loads((run / "evaluation.json").read_text())
    for key in ("sha256", "files"):
        del result[key]
    del result["calibration"]["ood_score"]
    result["calibration"]["ood_threshold"] = 0.1234
    (run / "evaluation.json").write_text(json.dumps(result))
    for asked in ({}, {"alpha": 0.2}):
        ensemble = load_ensemble(Run.open(run), asked=asked, tell=print)
        assert (ensemble.about.ood_score, ensemble.about.calibration["ood_threshold"]) == (None, 0.1234)
    name = "dice_x_w" if finished.kind == "dice" else "max_softmax"
    with torch.inference_mode():
        found = ensemble(images)["ood_score"]
    torch.testing.assert_close(found, finished.evaluation.scores[name].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("finished", ["mixed", "student"], indirect=True)
def test_some_members_and_the_other_average(finished, images, tmp_path):
    """If a selection was not evaluated, its temperature is fitted to the logits of what was."""
    chosen = [0, 2]
    own = evaluated(finished.run, tmp_path, f"members={chosen}", "average=probabilities")
    assert_as_evaluated(load_ensemble(Run.open(finished.run), chosen, "probabilities"), images, own)


def test_holds_what_inference_needs_and_no_more(finished):
    ensemble = load_ensemble(Run.open(finished.run))
    (parts,) = finished.run.glob("checkpoints/*")
    wanted = ("weights.encoder.", "weights.classifier.", "weights.network.")
    saved = [
        value.numel()
        for file in parts.glob("*.safetensors")
        for name, value in load_file(file).items()
        if name.startswith(wanted) or (file.stem == "trunk" and name.startswith("weights."))
    ]
    held = ensemble.state_dict()
    assert held.pop("bank_RMD").shape[:2] == (48, len(ensemble)), "the features of all training images, for KNN"
    assert sum(value.numel() for value in held.values()) == sum(saved)


def test_float_images(dice, images):
    as_bytes, as_floats = load_ensemble(Run.open(dice)), load_ensemble(Run.open(dice), images="float")
    with torch.inference_mode():
        expected, found = as_bytes(images), as_floats(images.permute(0, 3, 1, 2) / 255)
    assert found["label"].equal(expected["label"])
    torch.testing.assert_close(found["probabilities"], expected["probabilities"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "change", "line"),
    [
        ("uint8", lambda x: x / 255, r"images are torch.float32 .* takes uint8 \[N, H, W, 3\] with 32 x 32 pixels"),
        ("uint8", lambda x: (x / 255).to(torch.uint8), "the brightest pixel is [01] of 255: were images in 0..1"),
        ("uint8", lambda x: x.repeat(1, 7, 7, 1), r"\[\d+, 224, 224, 3\], .*the short side is scaled to `size`"),
        ("float", lambda x: x, "images are torch.uint8"),
        ("float", lambda x: x.permute(0, 3, 1, 2).float(), "pixels lie in .*: give images in 0..1"),
        ("float", lambda x: x.permute(0, 3, 1, 2) / 64 - 2, "pixels lie in -.*: give images in 0..1"),
    ],
)
def test_images_that_would_be_answered_wrongly_are_refused(dice, images, kind, change, line):
    ensemble = load_ensemble(Run.open(dice), images=kind, tell=print)
    with pytest.raises(ValueError, match=line):
        ensemble(change(images))


def test_student_alone(tmp_path, images):
    run = train_briefly(tmp_path, "method=okddip_dice", "structure=branch")
    own = evaluated(run, run, "members=[2]")
    student = load_ensemble(Run.open(run), "student")
    assert student.about.members == [2] and student.w is None
    assert_as_evaluated(student, images, own)


def test_run_that_was_never_evaluated_says_so_once(dice):
    told = []
    ensemble = load_ensemble(Run.open(dice), tell=told.append)
    assert ensemble.about.temperature == 1
    assert len(told) == 1 and "T = 1" in told[0] and "\n" not in told[0]


def test_real_images(tmp_path, real_data):
    run = train_briefly(tmp_path, "data=cifar100", "data.train_limit=100")
    evaluation = evaluated(run, run)
    real = load_few(compose_config(["data=cifar100"]).data)
    ensemble = load_ensemble(Run.open(run))
    assert ensemble.about.class_names == real.class_names
    assert_as_evaluated(ensemble, real.test.images_NHWC, evaluation)


def test_checkpoint_that_does_not_describe_its_source(tmp_path, monkeypatch):
    """Older checkpoints are like this: the images give the normalization, unless they have changed."""
    described = load_ensemble(Run.open(train_briefly(tmp_path)), tell=print).about
    start = Saver.start

    def start_without(saver, step, about, records):
        start(saver, step, {key: value for key, value in about.items() if key != "source"}, records)

    monkeypatch.setattr(Saver, "start", start_without)
    (tmp_path / "before").mkdir()
    run = train_briefly(tmp_path / "before")
    assert load_ensemble(Run.open(run), tell=print).about == described
    monkeypatch.setattr(sources, "load", lambda *_, **__: dataclasses.replace(load_all(SHAPES), data_digest="other"))
    with pytest.raises(ValueError, match="does not say how its images were normalized, and shapes has changed"):
        load_ensemble(Run.open(run), tell=print)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"members": [0, 3]}, "the run has members 0 to 2"),
        ({"members": "student"}, "method=dice trains none"),
        ({"members": "all"}, r"members=all: write numbers like \[0,2\], or student"),
        ({"members": [True]}, "write numbers like"),
        ({"average": "votes"}, "average=votes: write logits or probabilities"),
        ({"images": "int8"}, "images=int8: write uint8 or float"),
    ],
)
def test_what_cannot_be(dice, arguments, line):
    with pytest.raises(ValueError, match=line):
        load_ensemble(Run.open(dice), **arguments)


def test_an_evaluation_needs_no_run():
    """Networks that were trained elsewhere are measured and calibrated on any data, by their own normalization."""
    torch.manual_seed(0)
    source, config = load_few(SHAPES), compose_config(["data=shapes"])
    source = dataclasses.replace(source, train=sources.part(source.train, torch.arange(60)), mean=(9.0, 9.0, 9.0))
    members = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)) for _ in range(2)]
    ensemble = Ensemble.from_members(members, source.class_names, 32, mean=(0.4, 0.5, 0.6))
    findings = Evaluator(ensemble, source).evaluate(1, OodConfig({}, {}), config.calibration, None)
    answers = ensemble.predict(source.test.images_NHWC)
    torch.testing.assert_close(findings.tensors["logits"], answers.member_logits, rtol=1e-4, atol=1e-4)
    accuracy = (answers.labels == source.test.labels_N).double().mean().item()
    assert findings.result["ensemble"]["accuracy"] == pytest.approx(accuracy)
    assert findings.result["calibration"]["num_inputs"] == len(source.val) and findings.result["redundancy"] is None


def test_runs_that_are_none(dice, tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no config.yaml"):
        load_ensemble(Run.open(tmp_path))
    for text, changed, line in (
        ("name: resnet8", "name: resnet20", "is of another network, method or number of classes"),
        ('"num_members": 3', '"num_members": 4', "has no member-3: it is of another method or ensemble size"),
        ("resnet8\n  _target_: null", "resnet8\n  _target_: os.system", "add network.trusted=true if you trust it"),
    ):
        copy = tmp_path / changed.split()[-1].strip('"')
        shutil.copytree(dice, copy)
        file = copy / ("plan.json" if "num_members" in text else "config.yaml")
        assert text in file.read_text()
        file.write_text(file.read_text().replace(text, changed))
        with pytest.raises(ValueError, match=line):
            load_ensemble(Run.open(copy), tell=print)
