"""Exported files give the answers of the networks at any batch size; a file that does not is never left behind."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dicedist import Ensemble, export
from dicedist.config import extras
from dicedist.data import sources
from dicedist.evaluation import formats
from dicedist.evaluation.calibration import Calibration
from dicedist.evaluation.loading import load_ensemble
from dicedist.metrics.features import bank_of
from dicedist.runs.run import Run
from tests.support.tiny import train

ALONE = """
import json, sys
sys.modules["dicedist"] = None  # an import of it fails
import numpy, torch
images = torch.from_numpy(numpy.load("images.npy"))
extra = {"about": ""}
outputs = torch.export.load("model.pt2", extra_files=extra).module()(images)
numpy.savez("outputs.npz", **{name: value.numpy() for name, value in outputs.items()})
print(json.loads(extra["about"])["class_names"])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with branches: the last is a student, and the discriminator w compares the others."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("method=okddip_dice", "structure=branch", "ensemble.size=3", "data.split=full", "tracking=none")
    train(folder, *settings, "max_steps=2")
    return folder / "tiny"


@pytest.fixture(scope="module")
def images():
    return torch.randint(256, (5, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def answers(ensemble, images):
    return {name: value.numpy() for name, value in ensemble(images).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


class Flat(nn.Module):
    """A network of one's own, of a millisecond."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.dense = nn.Linear(3 * 8 * 8, 4)

    def forward(self, images):
        return self.dense(images.flatten(1))


@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize(
    ("kind", "quantiles", "score", "unlike"),
    [("lac", [0.72], None, 0.28), ("aps", [0.5, 0.6, 0.7, 0.8], None, 0.28), ("lac", [0.72], "knn", 0.4)],
)
def test_decisions_of_a_calibrated_ensemble_are_in_the_graph(tmp_path, format, kind, quantiles, score, unlike):
    plain = Ensemble.from_members([Flat(seed) for seed in range(3)], 4, 8, average="logits")
    chosen = Calibration("validation", 100, 1.7, 0.1, kind, len(quantiles) > 1, quantiles, 0.05, None, 0.28, unlike)
    calibrated = dataclasses.asdict(chosen) | {"ood_score": score}
    about = dataclasses.replace(plain.about, temperature=1.7, calibration=calibrated, ood_score=score)
    draws = torch.Generator().manual_seed(0)
    bank = {"bank_RMD": bank_of(torch.randn(3, 40, 4, generator=draws))}
    ensemble = Ensemble(about, plain.trunk, [*plain.encoders], [*plain.classifiers]).with_heads(bank)
    images = torch.randint(256, (8, 8, 8, 3), dtype=torch.uint8, generator=draws)
    answered = ensemble(images)
    assert {"label_set", "abstain", "reason", "ood_threshold"} <= answered.keys() - plain(images).keys()
    assert 0 < answered["abstain"].sum() < 8 and answered["label_set"].any()
    formats.export(ensemble, tmp_path / f"model.{format}", format, images)  # compares every output
    if format == "pt2":
        found = Ensemble.load(tmp_path / "model.pt2").predict(images)
        assert found.reason.equal(answered["reason"]) and found.label_set.equal(answered["label_set"])


def test_a_file_of_an_earlier_version_loads_and_answers_with_its_score(run, images, tmp_path):
    """It names neither an OOD score nor what came with it, and holds no bank."""
    export.run([f"run={run}", f"output={tmp_path / 'new.safetensors'}"])
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        about, weights = json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del about["ood_score"]
    chosen = Calibration("validation", 100, 1.7, 0.1, "lac", False, [0.72], 0.05, None, 0.28, 0.1)
    later = {"ood_score", "guarantee", "temperature_spread", "answered", "wrong", "fewest"}
    about["calibration"] = {k: v for k, v in dataclasses.asdict(chosen).items() if k not in later}
    save_file(weights, tmp_path / "old.safetensors", {"about": json.dumps(about)})
    found = Ensemble.load(tmp_path / "old.safetensors")
    expected = load_ensemble(Run.open(run), tell=print)
    assert "bank_RMD" not in weights and found.about.ood_score is None
    torch.testing.assert_close(found(images)["ood_score"], expected(images)["ood_score"])
    assert found(images)["ood_threshold"].tolist() == pytest.approx([0.1] * 5)


def test_pt2_needs_torch_alone(run, images, tmp_path, capsys):
    export.run([f"run={run}", f"output={tmp_path / 'model.pt2'}"])
    assert "test images of shapes" in capsys.readouterr().out
    np.save(tmp_path / "images.npy", images.numpy())
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ensemble = load_ensemble(Run.open(run), tell=print)
    assert_same(dict(np.load(tmp_path / "outputs.npz")), answers(ensemble, images))
    assert done.stdout.strip() == str(ensemble.about.class_names)


def test_onnx_of_float_images(run, images, tmp_path):
    path = tmp_path / "new" / "model.onnx"
    export.run([f"run={run}", "format=onnx", "images=float", "average=probabilities", f"output={path}"])
    floats = images.permute(0, 3, 1, 2).numpy().astype(np.float32) / 255
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    expected = answers(load_ensemble(Run.open(run), average="probabilities", tell=print), images)
    for count in (1, 5):
        found = dict(zip(names, session.run(None, {"images": floats[:count]}), strict=True))
        assert_same(found, {name: value[:count] for name, value in expected.items()})
    about = json.loads(session.get_modelmeta().custom_metadata_map["about"])
    assert about["images"] == "float" and about["members"] == [0, 1, 2]
    assert "short side is scaled to `size` by bilinear interpolation, and the middle" in about["preparation"]
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("members", "name"),
    [(None, "ensemble"), ([0], "member-0"), ([0, 1], "members-0-1"), ("student", "student")],
)
def test_safetensors_is_the_ensemble_again(run, images, members, name):
    export.run([f"run={run}", "format=safetensors", f"members={members or 'null'}"])
    path = run / f"{name}.safetensors"
    ensemble = load_ensemble(Run.open(run), members, tell=print)
    again = formats.read_ensemble(path)
    assert again.about == ensemble.about
    assert_same(answers(again, images), answers(ensemble, images))
    with safe_open(path, "pt") as file:
        assert not [key for key in file.keys() if "bottleneck" in key or "memory" in key]
    assert path.stat().st_mode & 0o777 == (run / "config.yaml").stat().st_mode & 0o777


def test_random_images_where_the_data_is_not(run, tmp_path, monkeypatch, capsys):
    def missing(*settings):
        raise ValueError("shapes is not in /data")

    monkeypatch.setattr(sources, "load", missing)
    export.run([f"run={run}", "format=safetensors", f"output={tmp_path / 'model'}"])
    assert "random images, because shapes is not available" in capsys.readouterr().out


@pytest.mark.parametrize("off", [1e-3, float("nan")])
def test_a_file_that_answers_otherwise_is_not_kept(run, tmp_path, monkeypatch, off):
    def read(path):
        ensemble = formats.read_ensemble(path)
        return lambda images: {**ensemble(images), "confidence": ensemble(images)["confidence"] + off}

    (tmp_path / "model.safetensors").write_text("an older one")
    monkeypatch.setitem(formats.FORMATS, "safetensors", (formats.write_safetensors, read))
    with pytest.raises(ValueError, match="not written, its answers differ by (0.001|nan) from"):
        export.run([f"run={run}", "format=safetensors", f"output={tmp_path / 'model.safetensors'}"])
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "an older one"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run=null"], "write run=runs/NAME"),
        (["run=nowhere"], "nowhere is not a run"),
        (["format=h5"], "format=h5: write one of pt2, onnx, safetensors"),
        (["members=[3]"], "the run has members 0 to 2"),
        (["images=bytes"], "images=bytes: write one of uint8, float"),
        (["output=."], r"\. is a folder: name a file"),
    ],
)
def test_refusals(run, arguments, line):
    with pytest.raises(ValueError, match=line):
        export.run([f"run={run}", *arguments])


def test_onnx_without_its_packages(run, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ValueError, match=r"format=onnx needs onnxscript: pip install 'dicedist\[onnx\]'"):
        export.run([f"run={run}", "format=onnx"])


def test_reading_what_was_never_exported(run, tmp_path):
    (weights,) = run.glob("checkpoints/*/member-0.safetensors")
    (tmp_path / "text").write_text("nothing of the kind")
    for path in (weights, tmp_path / "text", tmp_path / "lost"):
        with pytest.raises(ValueError, match="is not an ensemble that dicedist.export wrote"):
            formats.read_ensemble(path)
