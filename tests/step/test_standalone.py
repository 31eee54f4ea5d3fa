"""Networks that were trained elsewhere: calibrated, evaluated, saved, exported and read back."""

import numpy as np
import pytest
import torch
from torch import nn

from dicedist import Ensemble, Run, score
from tests.support.own import Squares

VAL, TEST = Squares(200, 1), Squares(200, 2)


def network(seed=0):
    """Reads the first color of an image, so that its answers are mostly right, and overconfident."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))


def trained(seed):
    member = network(seed)
    optimizer = torch.optim.Adam(member.parameters(), 0.05)
    data = Squares(300, 3 + seed)
    images, labels = torch.from_numpy(data.images), torch.tensor(data.targets)
    labels = torch.where(torch.rand(300) < 0.2, torch.randint(3, (300,)), labels)  # some are wrong
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(4 * member(images), labels).backward()
        optimizer.step()
    return nn.Sequential(*member, Sharper())


class Sharper(nn.Module):
    def forward(self, logits):
        return 4 * logits


def build():
    return nn.Sequential(*network(), Sharper())


@pytest.fixture(scope="module")
def members():
    return [trained(seed) for seed in range(3)]


@pytest.fixture
def ensemble(members):
    return Ensemble.from_members(members, Squares.classes, size=16)


def test_calibrated_and_evaluated_as_a_run_is(ensemble, tmp_path):
    assert ensemble.about.calibration is None
    calibrated = ensemble.calibrate(VAL, alpha=0.2, risk=0.1)
    assert calibrated is ensemble and ensemble.about.calibration["alpha"] == 0.2
    assert ensemble.about.calibration["source"] == "validation" and ensemble.about.calibration["num_inputs"] == 200
    outside = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    found = ensemble.evaluate(TEST, ood={"noise": outside}, output=tmp_path / "mine")
    answers = ensemble.predict(torch.from_numpy(TEST.images))
    expected = score(answers.member_logits, TEST.targets, average="probabilities")
    assert found["ensemble"]["accuracy"] == expected["ensemble"]["accuracy"]
    assert found["ensemble"]["nll"] == pytest.approx(expected["ensemble"]["nll"], rel=1e-5)
    in_sets = answers.label_set[torch.arange(200), torch.tensor(TEST.targets)].double().mean()
    assert found["calibration"]["test"]["set_coverage"] == pytest.approx(in_sets.item())
    assert found["calibration"]["temperature"] == ensemble.about.temperature
    assert "noise" in found["ood"] and "accuracy" in str(found)
    run = Run.open(tmp_path / "mine")
    assert run.results["ensemble"] == found["ensemble"] and "Ind." in run.report().read_text()
    assert "risk-against-coverage" in run.figures()
    with pytest.raises(ValueError, match="holds a run already"):
        ensemble.evaluate(TEST, output=tmp_path / "mine")


def test_val_and_arrays_do_as_well(ensemble):
    uint8 = (np.round(TEST.images * 255).astype(np.uint8).transpose(0, 2, 3, 1), np.array(TEST.targets))
    given = ensemble.evaluate(uint8, val=VAL)
    other = ensemble.evaluate(torch.utils.data.DataLoader(TEST, 7), val=VAL)
    assert given.result == other.result and given["calibration"]["num_inputs"] == 200


def test_a_detector_of_another_library_stands_in_the_tables(ensemble, tmp_path):
    """The energy of pytorch-ood is ours with the other sign, so both detect alike; a report ranks it."""
    energy = pytest.importorskip("pytorch_ood.detector").EnergyBased.score
    own = {"their energy": lambda logits, features: -energy(logits.mean(0))}
    noise = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), np.uint8)
    found = ensemble.evaluate(TEST, val=VAL, ood={"noise": noise}, ood_scores=own, output=tmp_path / "run")
    scores = found["ood"]["noise"]
    assert scores["their energy"]["auroc"] == pytest.approx(scores["energy"]["auroc"], abs=1e-9)
    assert "their energy" in str(found) and "their energy" in Run.open(tmp_path / "run").report().read_text()


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"energy": lambda logits, features: logits}, "'energy': the tables have a score of this name"),
        ({"mine": lambda logits, features: logits}, "'mine' returned .*: return a tensor .* of finite numbers"),
        ({"mine": lambda logits, features: [1.0]}, "'mine' returned list"),
    ],
)
def test_a_score_that_is_no_number_per_input_is_refused(ensemble, own, words):
    with pytest.raises(ValueError, match=words):
        ensemble.evaluate(TEST, ood_scores=own)


def test_saved_exported_and_read_back(ensemble, members, tmp_path):
    ensemble.calibrate(VAL)
    images = torch.from_numpy(TEST.images[:5])
    expected = ensemble.predict(images)
    with pytest.raises(ValueError, match="write save\\(path, model=make_network\\)"):
        ensemble.save(tmp_path / "model.safetensors")
    path = ensemble.save(tmp_path / "model.safetensors", model=build)
    assert ensemble.about.target == "tests.step.test_standalone.build"
    with pytest.raises(ValueError, match="network._target_=tests.step.test_standalone.build runs its code"):
        Ensemble.load(path)
    for loaded in (Ensemble.load(path, trusted=True), Ensemble.load(path, model=build)):
        assert torch.equal(loaded.predict(images).probabilities, expected.probabilities)
        assert torch.equal(loaded.predict(images).label_set, expected.label_set)
    graph = Ensemble.load(ensemble.export(tmp_path / "model.pt2"))
    torch.testing.assert_close(graph.predict(images).probabilities, expected.probabilities)
    with pytest.raises(ValueError, match="ends in .pt2, .onnx, .safetensors"):
        ensemble.export(tmp_path / "model.h5")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((np.zeros((0, 16, 16, 3), np.uint8), np.zeros(0, int)), "test has no items"),
        ((np.zeros((4, 16, 16, 3), np.uint8), [0, 1, 2, 3]), "classes from 0 to 3, the ensemble 3"),
        ((np.zeros((4, 16, 16, 3), np.uint8), [0.5] * 4), "classes|labels"),
        (3, "test=int: give a Dataset"),
    ],
)
def test_what_cannot_be_measured_is_one_line(ensemble, given, words):
    with pytest.raises(ValueError, match=words) as raised:
        ensemble.evaluate(given)
    assert "\n" not in str(raised.value)


OUTSIDE = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.calibrate(None), "val=NoneType: give a Dataset"),
        (lambda e: e.calibrate(TEST.images), "val=ndarray: give a Dataset"),
        (lambda e: e.calibrate((torch.rand(3, 5), [0, 1, 2])), r"val\[0\] has shape \[5\], and the ensemble reads im"),
        (lambda e: e.calibrate((OUTSIDE[:0], [])), "val has no items"),
        (lambda e: e.calibrate(VAL, coverag=0.8), "calibrate has no target coverag: write alpha, conformal"),
        (lambda e: e.calibrate(VAL, alpha="low"), "calibration.alpha=low: write a number above 0"),
        (lambda e: e.calibrate(VAL, ood_score="msp"), "ood_score=msp: write one of knn, max_softmax"),
        (lambda e: e.evaluate(None), "test=NoneType: give a Dataset"),
        (lambda e: e.evaluate(TEST, ood=OUTSIDE), r"ood is a Tensor: give a dict of names \(text\) -> inputs"),
        (lambda e: e.evaluate(TEST, ood={"none": OUTSIDE[:0]}), "none has no items"),
        (lambda e: e.evaluate(TEST, ood_scores=[max]), "ood_scores is a list: give a dict of names"),
        (lambda e: e.evaluate(TEST, ood_scores={"mine": 3}), "ood_scores 'mine' is a int: give a function of logits"),
        (lambda e: e.evaluate(TEST, output=__file__), "test_standalone.py is a file: name a folder"),
        (lambda e: e.export("model.safetensors"), r"write save\(path, model=make_network\)"),
        (lambda e: e.save("model.safetensors", model=lambda: nn.Linear(3, 4)), "is of another network, method or"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(ensemble, call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as raised:
        call(ensemble)
    assert "\n" not in str(raised.value)


def test_a_graph_only_predicts(ensemble, tmp_path):
    graph = Ensemble.load(ensemble.export(tmp_path / "model.pt2"))
    for call in (lambda: graph.calibrate(VAL), lambda: graph.evaluate(TEST), lambda: graph.export(tmp_path / "a.onnx")):
        with pytest.raises(ValueError, match=r"model.pt2 only predicts: load the run, or export it as safetensors"):
            call()


def test_classes_of_ood_inputs_do_not_matter(ensemble):
    class Alone(torch.utils.data.Dataset):
        def __len__(self):
            return len(OUTSIDE)

        def __getitem__(self, row):
            return OUTSIDE[row]

    named = [(image, "unknown", 3) for image in OUTSIDE]
    found = ensemble.evaluate(TEST, ood={"tensor": OUTSIDE, "alone": Alone(), "named": named})["ood"]
    first, *others = ({score: measured["auroc"] for score, measured in found[name].items()} for name in found)
    assert others == [first, first]  # their intervals differ, because names seed the resamples


def test_a_function_that_failed_is_forgotten(ensemble, tmp_path):
    """Else the next file would be built by the function that did not fit the first one."""
    ensemble.save(tmp_path / "model.safetensors", model=build)
    with pytest.raises(ValueError, match="is of another network"):
        Ensemble.load(tmp_path / "model.safetensors", model=lambda: nn.Linear(3, 4))
    with pytest.raises(ZeroDivisionError):
        Ensemble.load(tmp_path / "model.safetensors", model=lambda: 1 / 0)
    assert len(Ensemble.load(tmp_path / "model.safetensors", trusted=True)) == 3


@pytest.mark.parametrize("channels", [1, 5])
def test_onnx_of_images_that_are_not_rgb(channels, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    members = [nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, 3)) for _ in range(2)]
    ensemble = Ensemble.from_members(members, 3, 8, mean=[0.4] * channels, std=[0.3] * channels)
    images = torch.randint(256, (4, 8, 8, channels), dtype=torch.uint8)
    session = onnxruntime.InferenceSession(ensemble.export(tmp_path / "model.onnx"))
    (probabilities,) = session.run(["probabilities"], {"images": images.numpy()})
    np.testing.assert_allclose(probabilities, ensemble.predict(images).probabilities, atol=1e-5)
