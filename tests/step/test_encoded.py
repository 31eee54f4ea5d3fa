"""A training on images that are decoded on the fly: evaluated, with a gallery."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from dicedist import Ensemble, evaluate, export, train
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
    timm = pytest.importorskip("timm")
    published = timm.create_model("test_resnet")
    save_file(published.state_dict(), tmp_path / "weights.safetensors")
    keys = [key for key in tiny.TINY if not key.startswith(("data=", "ensemble", "epochs", "network"))]
    train.run([
        *keys, "data=files", f"data.root={root}", "data.size=16", "ensemble.size=1", "method=ind", "epochs=1",
        "network=timm/test_resnet", f"network.pretrained={tmp_path / 'weights.safetensors'}", f"run.dir={tmp_path}",
    ])  # fmt: skip
    assert json.loads((tmp_path / "tiny" / "evaluation.json").read_text())["num_inputs"] == 8
    assert 'id="gallery"' in (tmp_path / "tiny" / "report.html").read_text()
    export.run([f"run={tmp_path / 'tiny'}", "format=safetensors", f"output={tmp_path / 'one.safetensors'}"])
    for saved in (tmp_path / "tiny", tmp_path / "one.safetensors"):  # normalized as the weights want it, not the data
        about = Ensemble.load(saved).about
        assert (tuple(about.mean), tuple(about.std)) == tuple(map(published.pretrained_cfg.get, ("mean", "std")))


def test_data_of_more_classes_than_the_run_has(tmp_path, root):
    keys = [key for key in tiny.TINY if not key.startswith("data=")]
    train.run([*keys, "data=files", f"data.root={root}", "data.size=16", "max_steps=1", f"run.dir={tmp_path}"])
    for split in ("train", "test"):
        shutil.copytree(root / split / "elm", tmp_path / "more" / split / "oak")
        shutil.copytree(root / split, tmp_path / "more" / split, dirs_exist_ok=True)
    with pytest.raises(
        ValueError, match="trained on 2 classes, and the images of data.root have 3: write data.root=FOLDER of"
    ):
        evaluate.run([f"run={tmp_path / 'tiny'}", f"data.root={tmp_path / 'more'}"])
