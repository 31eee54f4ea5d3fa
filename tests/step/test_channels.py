"""A run on gray arrays, from training to an exported file that answers photos."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist import Ensemble, evaluate, export, predict
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.data import sources
from tests.support import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps on rows or columns of light, in one channel."""
    folder, rng = tmp_path_factory.mktemp("gray"), np.random.default_rng(0)
    images, labels = rng.integers(0, 99, (120, 16, 16), dtype=np.uint8), np.arange(120) % 2
    images[labels == 0, ::2] += 100
    images[labels == 1, :, ::2] += 100
    np.savez(folder / "lines.npz", images=images, labels=labels, class_names=["rows", "columns"])
    keys = ["data=arrays", f"data.root={folder / 'lines.npz'}", "data.channels=1", "data.size=16", "max_steps=2"]
    tiny.train(folder, *keys, "loss.mixup=0.2", "loss.cutmix=1")
    return folder / "tiny"


def test_the_plan_and_the_networks_have_one_channel(run):
    assert json.loads((run / "plan.json").read_text())["input_shape"] == [1, 16, 16]
    ensemble = Ensemble.load(run)
    assert ensemble.about.input_shape == (1, 16, 16)
    assert all(next(encoder.parameters()).shape[1] == 1 for encoder in ensemble.encoders)


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_exported_and_read_back(run, tmp_path, format):
    file = tmp_path / f"gray.{format}"
    export.run([f"run={run}", f"format={format}", f"output={file}"])
    images = np.random.default_rng(1).integers(0, 256, (5, 16, 16), dtype=np.uint8)
    expected, found = (Ensemble.load(source).predict(images) for source in (run, file))
    torch.testing.assert_close(found.probabilities, expected.probabilities, atol=1e-5, rtol=1e-4)


def test_photos_are_answered_as_gray(run, tmp_path, capsys):
    photo = Image.fromarray(np.random.default_rng(2).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    predict.run([f"run={run}", str(tmp_path / "photo.png"), "format=jsonl"])
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    answer = Ensemble.load(run).predict(photo.convert("L"))
    assert row["confidence"] == pytest.approx(answer.confidence.item(), abs=1e-4)


def test_served_photos_are_gray():
    pytest.importorskip("mlflow")
    from dicedist.tracking.mlflow.serving import decoded_image

    photo, file = Image.fromarray(np.random.default_rng(2).integers(0, 256, (8, 8, 3), dtype=np.uint8)), io.BytesIO()
    photo.save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    assert np.array_equal(decoded_image(text, 8, 1)[..., 0], np.asarray(photo.convert("L")))
    assert np.array_equal(decoded_image(text, 8, 3), np.asarray(photo))


def test_evaluated_again_but_not_with_corruptions(run):
    evaluate.run([f"run={run}"])
    with pytest.raises(ValueError, match="shift=corruptions: it needs RGB"):
        evaluate.run([f"run={run}", "shift=corruptions"])


def test_a_run_of_an_earlier_version_has_three_channels(tmp_path):
    config = compose_config(["data=shapes", "ensemble.size=2"])
    assert config.data.channels == 3 and Plan.of_older(config).input_shape == (3, 32, 32)
    assert sources.load(config.data, labels_only=True).shape == (3, 32, 32)
