"""Inputs that stand in two places are counted, and the user is warned once."""

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist.data.duplicates import warn_of_duplicates
from dicedist.data.ood import load_ood
from dicedist.data.sources import load
from tests.unit.test_data_vectors import X, Y, write


def test_vectors_of_test_among_training(tmp_path, fresh_home, data_config, capsys):
    write(tmp_path / "train.npz")
    write(tmp_path / "test.npz", np.concatenate([X[:3], X[:5] + 1]), Y[:8])
    source = load(data_config("vectors", root=str(tmp_path), split="full"))
    warn_of_duplicates(source)
    assert capsys.readouterr().err.count("3 of 8 test vectors are also among the training vectors") == 1
    np.savez(tmp_path / "far.npz", x=np.concatenate([X[4:6], X[:1] + 1, X + 9]))
    load_ood({"far": str(tmp_path / "far.npz")}, source, tmp_path)
    told = capsys.readouterr().err
    assert "ood.sets.far: 2 of 43 vectors are also among the training, 1 among the test vectors" in told
    np.savez(tmp_path / "far.npz", x=X + 9)
    load_ood({"far": str(tmp_path / "far.npz")}, source, tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["folder", "files"])
def test_images_of_test_among_training(tmp_path, fresh_home, data_config, capsys, name):
    rng, root = np.random.default_rng(0), tmp_path / "mine"
    for split in ("train", "test"):
        for of in ("ash", "elm"):
            (root / split / of).mkdir(parents=True)
            for place in range(3):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / of / f"{place}.png")
    config = data_config(name, root=str(root), size=32, split="full")
    warn_of_duplicates(load(config))
    assert capsys.readouterr().err == ""
    (root / "test" / "ash" / "copy.png").write_bytes((root / "train" / "elm" / "0.png").read_bytes())
    source = load(config)
    warn_of_duplicates(source)
    assert "1 of 7 test images are also among the training images" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    for place, path in enumerate(("train/elm/1.png", "test/elm/1.png", "test/elm/2.png")):
        (tmp_path / "other" / f"{place}.png").write_bytes((root / path).read_bytes())
    load_ood({"other": str(tmp_path / "other")}, source, root)
    assert (
        "ood.sets.other: 1 of 3 images are also among the training, 2 among the test images" in capsys.readouterr().err
    )


def test_no_warning_without_images_in_memory(data_config):
    source = load(data_config("shapes"), labels_only=True)
    warn_of_duplicates(source)
    assert isinstance(source.train.labels_N, torch.Tensor)
