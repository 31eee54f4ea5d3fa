"""A training on images that are decoded on the fly: evaluated, with a gallery."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from dicedist import evaluate, train
from tests.support import tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, each in (("train", 26), ("test", 4)):
        for name in ("ash", "elm"):
            (folder / split / name).mkdir(parents=True)
            for place in range(each):
                pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((24, 20)).save(folder / split / name / f"{place}.jpg")
    return folder


def test_it_is_trained_and_evaluated(tmp_path, root):
    keys = [key for key in tiny.TINY if not key.startswith(("data=", "ensemble", "epochs"))]
    settings = [
        "data=files",
        f"data.root={root}",
        "data.size=16",
        "ensemble.size=1",
        "method=ind",
        "epochs=1",
    ]
    train.run([*keys, *settings, f"run.dir={tmp_path}"])
    assert json.loads((tmp_path / "tiny" / "evaluation.json").read_text())["num_inputs"] == 8
    assert 'id="gallery"' in (tmp_path / "tiny" / "report.html").read_text()
    for split in ("train", "test"):
        shutil.copytree(root / split / "elm", tmp_path / "more" / split / "oak")
        shutil.copytree(root / split, tmp_path / "more" / split, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="trained on 2 classes, and the images of data.root have 3: name the data of"):
        evaluate.run([f"run={tmp_path / 'tiny'}", f"data.root={tmp_path / 'more'}"])
