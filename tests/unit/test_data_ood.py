"""Out-of-distribution sets: real ones by name, a user's by path, and the messages about missing ones."""

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist.data import ood
from dicedist.data.ood import load_ood
from dicedist.data.pipeline import evaluation_batches
from dicedist.data.sources import Split, load


@pytest.fixture(scope="module")
def source(real_data, data_config):
    return load(data_config("cifar100"))


def test_real_sets_by_name(real_data, source):
    names = ["cifar10", "svhn", "tinyimagenet_crop", "tinyimagenet_resize", "lsun_crop", "isun"]
    found, missing = load_ood(dict.fromkeys(names), source, real_data)
    assert list(found) == names[:4]
    assert {name: tuple(images.shape) for name, images in found.items()} == {
        "cifar10": (10_000, 32, 32, 3),
        **{name: (4000, 32, 32, 3) for name in names[1:4]},
    }
    assert all(images.dtype == torch.uint8 for images in found.values())
    assert missing == [
        f"lsun_crop: put LSUN/test or ood/lsun_crop.npz into {real_data}, or write ood.sets.lsun_crop=FOLDER_OR_NPZ",
        f"isun: put iSUN/iSUN_patches or ood/isun.npz into {real_data}, or write ood.sets.isun=FOLDER_OR_NPZ",
    ]
    svhn = Split(found["svhn"], torch.zeros(4000, dtype=torch.int64))
    images, _ = next(evaluation_batches(svhn, source, 256, torch.device("cpu")))
    assert images.shape == (256, 3, 32, 32) and images.isfinite().all()


def test_the_training_distribution_is_refused(real_data, source, tmp_path):
    with pytest.raises(ValueError, match="^ood.sets.cifar100: the model was trained on cifar100"):
        load_ood({"cifar100": None}, source, real_data)
    np.savez(tmp_path / "sly.npz", images=source.test.images_NHWC.numpy())
    with pytest.raises(ValueError, match="sly.npz is the test set of cifar100 itself$"):
        load_ood({"sly": str(tmp_path / "sly.npz")}, source, real_data)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("tinyimagenet_crop", "Imagenet/test"),
        ("tinyimagenet_resize", "Imagenet_resize/Imagenet_resize"),
        ("lsun_crop", "LSUN/test"),
        ("lsun_resize", "LSUN_resize/LSUN_resize"),
        ("isun", "iSUN/iSUN_patches"),
    ],
)
def test_archives_of_the_literature(source, tmp_path, name, folder):
    (tmp_path / folder).mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 36, 36, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / folder / f"{number}.png")
    found, missing = load_ood({name: None}, source, tmp_path)
    assert missing == []
    if name.endswith("_crop"):
        assert found[name].equal(torch.from_numpy(pixels[:, 2:34, 2:34]))
    else:
        small = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR)) for image in pixels]
        assert found[name].equal(torch.from_numpy(np.stack(small)))


def test_a_users_own(source, tmp_path, caplog):
    mine = tmp_path / "mine"
    mine.mkdir()
    Image.new("L", (100, 20), 128).save(mine / "gray.png")
    Image.new("RGB", (20, 20), (10, 20, 30)).save(mine / "small.jpg", quality=100)
    (mine / "broken.jpg").write_bytes(b"no")
    np.savez(tmp_path / "mine.npz", images=np.zeros((5, 64, 40, 3), np.uint8), labels=np.zeros(5))
    sets = {"mine": str(mine), "mine_crop": str(mine), "packed": str(tmp_path / "mine.npz"), "lost": "/no/where"}
    found, missing = load_ood(sets, source, tmp_path)
    assert {name: tuple(images.shape[:3]) for name, images in found.items()} == {
        "mine": (2, 32, 32),
        "mine_crop": (2, 32, 32),
        "packed": (5, 32, 32),
    }
    assert missing == ["lost: /no/where does not exist, put a folder of images or an .npz with `images` there"]
    assert "left out 1 image that cannot be decoded" in caplog.text


def test_svhn_of_torchvision(source, tmp_path, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    assert SVHN.split_list["test"][1:] == [ood.SVHN_FILE, ood.SVHN_MD5]
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.parent.mkdir()
    savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.full((6, 1), 10, np.uint8)})
    with pytest.raises(ValueError, match="test_32x32.mat: damaged or not SVHN's"):
        load_ood({"svhn": None}, source, tmp_path)
    monkeypatch.setattr(ood, "SVHN_MD5", None)
    found, _ = load_ood({"svhn": None}, source, tmp_path)
    assert found["svhn"].equal(torch.from_numpy(images))
    monkeypatch.setattr(SVHN, "split_list", {"test": ["", "test_32x32.mat", None]})
    theirs = SVHN(path.parent, split="test")
    assert np.array_equal(theirs.data, images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"pictures": np.zeros((2, 32, 32, 3), np.uint8)}, "not an .npz with an array `images`, nor a .npy"),
        ({"images": np.zeros((2, 32, 32, 3))}, r"images are float64 \(2, 32, 32, 3\), write uint8 \[N, H, W, 3\]"),
        ({"images": np.zeros((2, 3, 32, 32), np.uint8)}, "images are .* write uint8"),
        ({"images": np.zeros((0, 32, 32, 3), np.uint8)}, "images are .* write uint8"),
        ({"images": np.array([{"a": "pickle"}], dtype=object)}, "not an .npz with an array `images`, nor a .npy"),
    ],
)
def test_npz_that_is_not_images(source, tmp_path, arrays, says):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=f"bad.npz: {says}"):
        load_ood({"bad": str(tmp_path / "bad.npz")}, source, tmp_path)


def test_damaged_npz_and_empty_folder(source, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ValueError, match="bad.npz: not an .npz"):
        load_ood({"bad": str(tmp_path / "bad.npz")}, source, tmp_path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing holds no images that can be decoded"):
        load_ood({"nothing": str(tmp_path / "nothing")}, source, tmp_path)


def test_openood_lists_which_images_count(source, tmp_path):
    """Of a set that shares classes with the training, OpenOOD lists the images to take, and leaves the others out."""
    folder = tmp_path / "images_classic" / "tin" / "test"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((64, 64, 3), 40 * number, np.uint8)).save(folder / f"{number}.png")
    lists = tmp_path / "benchmark_imglist" / "cifar100"
    lists.mkdir(parents=True)
    found, _ = load_ood({"tin": None}, source, tmp_path)
    assert found["tin"][:, 0, 0, 0].tolist() == [0, 40, 80]
    (lists / "test_tin.txt").write_text("tin/test/2.png -1\ntin/test/0.png -1\n")
    found, missing = load_ood({"tin": None, "texture": None}, source, tmp_path)
    assert found["tin"][:, 0, 0, 0].tolist() == [80, 0] and found["tin"].shape[1:] == (32, 32, 3)
    assert missing[0].startswith("texture: put ood/texture.npz into")
