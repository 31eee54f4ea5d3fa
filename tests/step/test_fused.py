"""A fused classifier is measured, used by predict and exported, in addition to the members' mean."""

import json

import numpy as np
import pytest
import torch

from dicedist import evaluate, export, predict
from dicedist.evaluation.ensemble import Ensemble
from dicedist.runs.run import Run
from tests.support import tiny
from tests.support.processes import run_ranks

KINDS = {"ffl": ("method=ffl",), "pcl": ("method=pcl", "structure=branch")}
SHORT = ("max_steps=2",)


def train_on_rank(rank, world_size, run_dir, *options):
    return tiny.build(run_dir, *SHORT, *options, rank=rank, world_size=world_size).train_and_evaluate()


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    train_on_rank(0, 1, folder, *KINDS[request.param])
    return Run(folder / "tiny")


def by_hand(run, images):
    """The fused logits of the weights in the checkpoint, in plain lines."""
    ensemble, state = Ensemble.load(run.directory), {}
    shared = ensemble.trunk(ensemble.normalize(images))
    read = [encoder.outputs(shared) for encoder in ensemble.encoders]
    if run.config().method.name == "pcl":
        state = tiny.tensors_of(run.directory, 2)
        weight, bias = (state[f"shared/average.module.fusion.dense.{name}"] for name in ("weight", "bias"))
        return torch.cat([features for features, _, _ in read], 1) @ weight.T + bias
    layers = {k.removeprefix("fusion/weights.network."): v for k, v in tiny.tensors_of(run.directory, 2).items()}
    h = torch.cat([last for _, _, last in read], 1)
    for place, groups in ((0, h.shape[1]), (3, 1)):
        weight, norm = layers[f"layers.{place}.weight"], f"layers.{place + 1}."
        h = torch.nn.functional.conv2d(h, weight, padding=weight.shape[-1] // 2, groups=groups)
        std = torch.sqrt(layers[norm + "running_var"] + 1e-5)
        scaled = (h - layers[norm + "running_mean"][:, None, None]) / std[:, None, None]
        h = torch.relu(scaled * layers[norm + "weight"][:, None, None] + layers[norm + "bias"][:, None, None])
    return h.mean((2, 3)) @ layers["layers.8.weight"].T + layers["layers.8.bias"]


@torch.no_grad()
def test_the_fused_classifier_is_measured_and_answers(run, tmp_path, capsys):
    ensemble = Ensemble.load(run.directory)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8))
    expected = by_hand(run, images)
    answers = ensemble.predict(images)
    torch.testing.assert_close(answers.fused_probabilities, expected.softmax(1), atol=1e-5, rtol=1e-4)
    assert answers.fused_label.tolist() == expected.argmax(1).tolist()
    assert answers.rows()[0]["fused_label"] == answers.class_names[expected[0].argmax()]
    torch.testing.assert_close(answers.probabilities, answers.member_logits.mean(0).softmax(1), atol=1e-5, rtol=1e-4)
    assert ensemble[0].predict(images).fused_label is None  # it needs all members
    torch.testing.assert_close(ensemble[:].predict(images).fused_probabilities, answers.fused_probabilities)
    for format in ("safetensors", "pt2"):
        export.run([f"run={run.directory}", f"output={tmp_path / 'file'}.{format}", f"format={format}"])
        found = Ensemble.load(tmp_path / f"file.{format}").predict(images)
        torch.testing.assert_close(found.fused_probabilities, answers.fused_probabilities, atol=1e-5, rtol=1e-4)
    result = run.result()
    assert 0 <= result["fused"]["accuracy"] <= 1 and result["fused"] != result["ensemble"]
    evaluate.run([f"run={run.directory}", f"output={tmp_path / 'again'}"])
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again["fused"]["nll"] == pytest.approx(result["fused"]["nll"], rel=1e-4)
    assert "fused" in capsys.readouterr().out


def test_ranks_fuse_as_one_process(tmp_path, run):
    name = run.config().method.name
    run_ranks(3 if name == "ffl" else 2, train_on_rank, 3 if name == "ffl" else 2, tmp_path, *KINDS[name])
    found = Run(tmp_path / "tiny").result()["fused"]
    assert found["nll"] == pytest.approx(run.result()["fused"]["nll"], rel=1e-3)


def test_members_alone_have_no_fused_classifier(tmp_path, run):
    evaluate.run([f"run={run.directory}", "members=[0]", f"output={tmp_path / 'alone'}"])
    assert "fused" not in json.loads((tmp_path / "alone" / "evaluation.json").read_text())


def test_predict_says_whose_label_it_shows(tmp_path, run, capsys):
    from PIL import Image

    Image.new("RGB", (32, 32), (200, 30, 30)).save(tmp_path / "red.png")
    predict.run([f"run={run.directory}", str(tmp_path / "red.png")])
    assert "label, confidence and all calibrated fields come from the members' mean" in capsys.readouterr().err
