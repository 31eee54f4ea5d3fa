"""Images of other than three channels: files read as gray, arrays of any number, adapted weights, and refusals."""

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dicedist import Ensemble
from dicedist.algorithm.networks import build
from dicedist.algorithm.networks.foreign import adapted
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.data import uses_dali
from dicedist.data.ood import load_ood, refuse_unreadable
from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.sets.own import Items
from dicedist.data.shift import open_shift
from dicedist.data.sources import load
from dicedist.reporting.gallery import png
from dicedist.runs.pretrained import Pretrained, normalized_as_published

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
LABELS = np.arange(24) % 3


def pixels(channels, count=24, side=32):
    return RNG.integers(0, 256, (count, side, side, channels), dtype=np.uint8)


@pytest.fixture
def photos(tmp_path, fresh_home):
    """RGB photos in the layout of data=folder."""
    for number, image in enumerate(pixels(3, side=40)):
        folder = tmp_path / "photos" / ("train" if number < 16 else "test") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:02}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("name", ["folder", "files"])
def test_photos_are_read_as_gray(photos, data_config, name):
    config = data_config(name, root=str(photos), channels=1, split="full", augment="none")
    source = load(config)
    assert source.shape == (1, 32, 32) and len(source.mean) == len(source.std) == 1
    files = sorted((photos / "test").rglob("*.png"))
    gray = [Image.open(file).convert("L").resize((32, 32), Image.Resampling.BILINEAR) for file in files]
    assert np.array_equal(source.test.take(torch.arange(len(files))), np.stack(gray)[..., None])
    (batch,) = Loader(source.train, config, source, 16, 0, CPU, [0]).epoch(0)
    assert batch.images[0].shape == (16, 1, 32, 32)
    colored = load(data_config(name, root=str(photos), split="full"))
    assert colored.shape == (3, 32, 32) and colored.test.take(torch.arange(2)).shape == (2, 32, 32, 3)


def write_npz(root, images, labels):
    for split, rows in (("train", slice(0, 16)), ("test", slice(16, None))):
        np.savez(root / f"{split}.npz", images=images[rows], labels=labels[rows], class_names=["elm", "oak", "ash"])
    return root


def write_npy(root, images, labels):
    for split, rows in (("train", slice(0, 16)), ("test", slice(16, None))):
        np.save(root / f"{split}_images.npy", images[rows])
        np.save(root / f"{split}_labels.npy", labels[rows])
    return root


def write_file(root, images, labels):
    np.savez(root / "all.npz", images=images, labels=labels)
    return root / "all.npz"


def write_pair(root, images, labels):
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", labels)
    return root


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("write", [write_npz, write_npy, write_file, write_pair])
def test_arrays(tmp_path, fresh_home, data_config, channels, write):
    images = pixels(channels)
    given = images[..., 0] if channels == 1 else images
    config = data_config("arrays", root=str(write(tmp_path, given, LABELS)), channels=channels, split="full")
    config = dataclasses.replace(config, augment=["crop", "flip", "cutout", "erase"], val_fraction=0.1)
    source = load(config)
    assert source.shape == (channels, 32, 32)
    assert source.class_names == (["elm", "oak", "ash"] if write is write_npz else ["0", "1", "2"])
    splits = [split.images_NHWC.numpy() for split in (source.train, source.test)]
    kept = np.concatenate(splits)
    if write in (write_npz, write_npy):
        assert np.array_equal(kept, images)
    else:  # a fifth of each class is the test set
        assert len(splits[1]) == 6 and {each.tobytes() for each in kept} == {each.tobytes() for each in images}
    assert np.allclose(source.mean, splits[0].mean((0, 1, 2)) / 255)
    (views, _), *_ = evaluation_batches(source.test, source, 100, CPU)
    mean, std = np.array(source.mean), np.array(source.std)
    expected = (splits[1] / 255 - mean) / std
    assert np.allclose(views, expected.transpose(0, 3, 1, 2), atol=1e-5)
    first = next(Loader(source.train, config, source, 8, 0, CPU, [0]).epoch(0))
    assert first.images[0].shape == (8, channels, 32, 32)


def test_arrays_of_another_size_are_resized_channel_by_channel(tmp_path, fresh_home, data_config):
    images = pixels(4, side=20)
    np.savez(tmp_path / "all.npz", images=images, labels=LABELS)
    np.savez(tmp_path / "one.npz", images=images[..., 2], labels=LABELS)
    gray, whole = (
        load(data_config("arrays", root=str(tmp_path / f"{name}.npz"), channels=channels, size=16, split="full"))
        for name, channels in (("one", 1), ("all", 4))
    )
    assert np.array_equal(whole.test.images_NHWC[..., 2:3], gray.test.images_NHWC)


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"x": LABELS}, "all.npz holds x: write images [N, H, W, C] and labels [N]"),
        ({"images": pixels(3), "labels": LABELS}, "images are uint8 [24, 32, 32, 3], and data.channels=1: write uint8"),
        ({"images": pixels(1) / 255, "labels": LABELS}, "images are float64 [24, 32, 32, 1], and data.channels=1"),
        ({"images": pixels(1), "labels": LABELS[:9]}, "24 images and labels int64 [9]: write a whole number from 0"),
        ({"images": pixels(1), "labels": LABELS - 1}, "24 images and labels int64 [24]: write a whole number from 0"),
        ({"images": pixels(1), "labels": 0 * LABELS}, "all.npz holds 1 classes, at least two are needed"),
    ],
)
def test_wrong_arrays_are_refused_in_one_line(tmp_path, fresh_home, data_config, arrays, line):
    np.savez(tmp_path / "all.npz", **arrays)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        load(data_config("arrays", root=str(tmp_path / "all.npz"), channels=1))
    assert "\n" not in str(error.value)


def test_arrays_that_are_not_there(tmp_path, fresh_home, data_config):
    with pytest.raises(ValueError, match="or a FOLDER with train.npz and test.npz, or train_images.npy and "):
        load(data_config("arrays", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data=folder", "data.root=x", "data.channels=5"], "image files have 1 or 3 channels, write data=arrays or"),
        (["data=cifar10", "data.channels=1"], "images of cifar10 have 3 channels, leave data.channels out"),
        (
            ["data=arrays", "data.root=x", "data.channels=1", "data.augment=[crop,jitter]"],
            "data.augment=jitter changes",
        ),
        (["data=arrays", "data.root=x", "data.channels=5", "data.augment=[trivial]"], "data.augment=trivial changes"),
        (["data=folder", "data.root=x", "data.channels=1", "data.pipeline=dali"], "write data.pipeline=torch"),
        (["data=arrays", "data.channels=1"], "data=arrays: write data.root=FILE.npz"),
        (["data=own", "data._target_=a.B", "data.channels=0"], "data.channels=0: write a whole number from 1"),
    ],
)
def test_settings_that_need_three_channels_are_refused(words, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        compose_config(words)


def test_dali_reads_three_channels_only(data_config):
    assert not uses_dali(data_config("folder", channels=1))


def test_own_datasets():
    gray, five = pixels(1, 1, 20)[0], pixels(5, 1, 20)[0]
    given = [(gray, 0), (gray[..., 0], 1), (gray[..., 0] / 255, 1), (gray.transpose(2, 0, 1) / 255, 1)]
    given.append((Image.fromarray(gray[..., 0]).convert("RGB"), 1))
    items = Items(given, "mine", 20, 1)
    assert all(np.array_equal(items.item(row)[0], gray) for row in range(5))
    items = Items([(five, 0), (five.transpose(2, 0, 1) / 255, 1)], "mine", 20, 5)
    assert all(np.array_equal(items.item(row)[0], five) for row in range(2))
    with pytest.raises(ValueError, match="image files have 1 or 3 channels, not 5"):
        Items(given[4:], "mine", 20, 5).item(0)
    with pytest.raises(ValueError, match=r"is uint8 \[20, 20, 5\]: return a PIL image, uint8 \[H, W, 1\]"):
        Items([(five, 0)], "mine", 20, 1).item(0)


def test_shift_and_sets_of_rgb(tmp_path, fresh_home, data_config, photos):
    np.savez(tmp_path / "all.npz", images=pixels(1), labels=LABELS)
    source = load(data_config("arrays", root=str(tmp_path / "all.npz"), channels=1, split="full"))
    for kind in ("corruptions", "rotations", "cifar_c"):
        with pytest.raises(ValueError, match=f"shift={kind}: it needs RGB, but the run learned images of 1 chan"):
            open_shift(kind, [1], None, source, tmp_path)
    np.savez(tmp_path / "color.npz", images=pixels(3, 4))
    np.savez(tmp_path / "gray.npz", images=pixels(1, 4)[..., 0])
    color, gray = (str(tmp_path / f"{name}.npz") for name in ("color", "gray"))
    found, missing = load_ood({"mine": gray, "photos": str(photos / "test"), "svhn": None}, source, tmp_path)
    assert missing == ["svhn: sets are looked up for RGB models, write ood.sets.svhn=FOLDER_OR_NPZ"]
    shapes = {name: tuple(images.shape) for name, images in found.items()}
    assert shapes == {"mine": (4, 32, 32, 1), "photos": (8, 32, 32, 1)}
    line = r"color.npz: images are uint8 .*, write uint8 \[N, H, W, 1\]"
    with pytest.raises(ValueError, match=line):
        load_ood({"mine": color}, source, tmp_path)
    with pytest.raises(ValueError, match=line):
        refuse_unreadable({"mine": color}, source.shape)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 7])
def test_a_first_layer_is_adapted_as_timm_does(channels):
    timm = pytest.importorskip("timm")
    weight = torch.randn(8, 3, 5, 5)
    expected = timm.models.adapt_input_conv(channels, weight)
    torch.testing.assert_close(adapted(weight, channels) if channels != 3 else weight, expected)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("name", ["resnet8", "wrn28_2", "preresnet110", "torchvision/resnet18", "timm/test_resnet"])
def test_networks_read_as_many_channels_as_the_data_have(name, channels):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    split = ["network.split=layer3"] if "/" in name else []
    network = build(compose_config([f"network={name}", *split]).network, (channels, 32, 32))
    assert network.eval()(torch.rand(2, channels, 32, 32)).shape == (2, network.feature_dim)


@pytest.mark.parametrize("channels", [1, 4])
def test_pretrained_weights_are_adapted(tmp_path, fresh_home, data_config, channels):
    """The file of timm's network for RGB, as timm itself loads it with in_chans."""
    timm = pytest.importorskip("timm")
    state = timm.create_model("test_resnet", num_classes=5).state_dict()
    save_file(state, tmp_path / "rgb.safetensors")
    words = ["data=arrays", "data.root=x", f"data.channels={channels}", "network=timm/test_resnet", "ensemble.size=2"]
    config = compose_config([*words, f"network.pretrained={tmp_path / 'rgb.safetensors'}"])
    plan = Plan.of(config, 2, config.data.image_shape)
    weights, _ = Pretrained(config, plan).of(0)
    theirs = timm.create_model("test_resnet", in_chans=channels, pretrained=False, num_classes=5)
    timm.models.load_pretrained(
        theirs, {**theirs.pretrained_cfg, "state_dict": state}, num_classes=5, in_chans=channels, strict=True
    )
    for key, value in theirs.state_dict().items():
        if key.startswith("fc."):
            continue  # timm makes a new head, because the published one has 1000 classes
        torch.testing.assert_close(weights[key], value)
    np.savez(tmp_path / "all.npz", images=pixels(channels), labels=LABELS)
    source = load(data_config("arrays", root=str(tmp_path / "all.npz"), channels=channels, split="full"))
    assert normalized_as_published(source, config, plan) is source


def test_a_gray_ensemble_takes_photos_and_gray_arrays(tmp_path):
    members = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)) for _ in range(2)]
    ensemble = Ensemble.from_members(members, 2, 8, mean=[0.5], std=[0.25])
    image = pixels(3, 1, 8)[0]
    Image.fromarray(image).save(tmp_path / "photo.png")
    gray = np.array(Image.fromarray(image).convert("L"))
    expected = ensemble.predict(Image.fromarray(gray)).probabilities
    forms = [tmp_path / "photo.png", [Image.fromarray(image)], gray, gray[None], gray[..., None], gray[None, ..., None]]
    for given in (*forms, torch.from_numpy(gray)[None, None], gray / 255, np.stack([gray] * 3)):
        torch.testing.assert_close(ensemble.predict(given).probabilities[:1], expected)
    with pytest.raises(
        ValueError, match=re.escape("images have shape [2, 8, 8, 3]: give [N, H, W, 1] or [N, 1, H, W]")
    ):
        ensemble.predict(pixels(3, 2, 8))
    with pytest.raises(ValueError, match="std=.*: give one number for each channel, a std above 0"):
        Ensemble.from_members(members, 2, 8, mean=[0.5])


def test_an_ensemble_of_five_channels_takes_arrays_only(tmp_path):
    members = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(320, 2)) for _ in range(2)]
    ensemble = Ensemble.from_members(members, 2, 8, mean=[0.5] * 5, std=[0.25] * 5)
    images = pixels(5, 3, 8)
    as_tensor = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(ensemble.predict(images).probabilities, ensemble.predict(as_tensor).probabilities)
    Image.fromarray(pixels(3, 1, 8)[0]).save(tmp_path / "photo.png")
    for given in (tmp_path / "photo.png", tmp_path, Image.open(tmp_path / "photo.png")):
        with pytest.raises(ValueError, match="image files have 1 or 3 channels, not 5: give arrays"):
            ensemble.predict(given)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (5, "L")])
def test_the_gallery_shows_any_number_of_channels(channels, mode):
    image = pixels(channels, 1)[0]
    shown = Image.open(io.BytesIO(base64.b64decode(png(image))))
    expected = image if channels == 3 else image.mean(2).round()
    assert shown.mode == mode and np.array_equal(np.asarray(shown), expected)
