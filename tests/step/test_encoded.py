"""A training on images that are decoded on the fly: resumed bit for bit, evaluated, with a gallery."""

import json

import numpy as np
import pytest
from PIL import Image

from dicedist import train
from dicedist.data import __main__ as command
from tests.support import tiny


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, each in (("train", 26), ("test", 4)):
        for name in ("ash", "elm"):
            (root / split / name).mkdir(parents=True)
            for place in range(each):
                pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((24, 20)).save(root / split / name / f"{place}.jpg")
    command.run(["pack", str(root), str(root / "packed"), "images=20"])
    return {"files": root, "shards": root / "packed"}


def test_resumed_equals_uninterrupted(tmp_path, roots):
    overrides = ["data=shards", f"data.root={roots['shards']}", "data.size=16", "method=ind", "ensemble.size=1"]
    tiny.train(tmp_path / "whole", *overrides)
    assert tiny.train(tmp_path / "parts", *overrides, after_step=tiny.asked_after(7))
    tiny.train(tmp_path / "parts", *overrides)
    tiny.assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")


def test_it_is_trained_and_evaluated(tmp_path, roots):
    keys = [key for key in tiny.TINY if not key.startswith(("data=", "ensemble", "epochs"))]
    settings = [
        "data=files",
        f"data.root={roots['files']}",
        "data.size=16",
        "ensemble.size=1",
        "method=ind",
        "epochs=1",
    ]
    train.run([*keys, *settings, f"run.dir={tmp_path}"])
    assert json.loads((tmp_path / "tiny" / "evaluation.json").read_text())["num_inputs"] == 8
    assert 'id="gallery"' in (tmp_path / "tiny" / "report.html").read_text()
