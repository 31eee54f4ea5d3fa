"""Image folders as users have them: any size, any format, some of it broken. The images are CIFAR's, enlarged."""

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist.data.pipeline import Loader
from dicedist.data.sets.folder import decode_file
from dicedist.data.sources import load

CLASSES = ["apple", "bear", "chair"]


@pytest.fixture(scope="module")
def originals(real_data, data_config):
    """uint8 images of three classes, 40 of each."""
    source = load(data_config("cifar100"))
    rows = [(source.test.labels_N == source.class_names.index(name)).nonzero()[:40, 0] for name in CLASSES]
    return dict(zip(CLASSES, (source.test.take(of_class).numpy() for of_class in rows), strict=True))


def save(image, path, kind):
    """Saves an image in one of the formats that occur in practice."""
    if kind == "16-bit.png":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif kind == "rotated.jpg":  # a camera held sideways: the file holds the picture rotated, and says so
        exif = Image.Exif()
        exif[0x0112] = 6
        return image.rotate(90, expand=True).save(path.with_suffix(".jpg"), exif=exif, quality=95)
    elif mode := {"gray.png": "L", "alpha.png": "RGBA", "cmyk.jpg": "CMYK", "palette.png": "P"}.get(kind):
        image = image.convert(mode)
    image.save(path.with_suffix("." + kind.rpartition(".")[2].lower()), quality=95)


KINDS = ["color.jpg", "color.png", "gray.png", "alpha.png", "cmyk.jpg", "palette.png", "16-bit.png", "rotated.jpg"]
KINDS += ["color.bmp", "color.webp"]


@pytest.fixture
def root(tmp_path, originals, fresh_home):
    """A folder with train/ and test/, with images of 20 to 110 pixels in width and height."""
    rng = np.random.default_rng(0)
    for name, images in originals.items():
        for number, image in enumerate(images):
            folder = tmp_path / "images" / ("train" if number < 30 else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            large = Image.fromarray(image).resize(rng.integers(20, 110, 2).tolist(), Image.Resampling.BICUBIC)
            save(large, folder / f"{number:03}", KINDS[number % len(KINDS)])
    return tmp_path / "images"


def break_three(root):
    good = sorted((root / "train" / "bear").glob("*.jpg"))[0]
    (root / "train" / "apple" / "cut.jpg").write_bytes(good.read_bytes()[:-200])
    (root / "train" / "chair" / "text.png").write_text("this is no image")
    (root / "test" / "bear" / "empty.jpg").write_bytes(b"")
    return {"train/apple/cut.jpg", "train/chair/text.png", "test/bear/empty.jpg"}


@pytest.mark.parametrize("backend", ["torch", "dali"])
def test_mixed_folder_with_corrupt_files(root, data_config, caplog, capfd, backend):
    if backend == "dali":
        pytest.importorskip("nvidia.dali")
    broken = break_three(root)
    config = data_config("folder", root=str(root), pipeline=backend, val_fraction=0.2, num_threads=2)
    source = load(config)
    listed = {record.args[0]: record.args[1] for record in caplog.records if record.msg.startswith("left out")}
    assert set(listed) == broken and "truncated" in listed["train/apple/cut.jpg"]
    assert capfd.readouterr().err == "", "DALI writes its own red lines past Python"
    assert source.class_names == CLASSES
    assert [len(source.train), len(source.val), len(source.test)] == [72, 18, 30]
    assert source.val.labels_N.bincount().tolist() == [6, 6, 6]

    files = [file for split in ("train", "test") for file in sorted((root / split).rglob("*.*"))]
    good = [file for file in files if str(file.relative_to(root)) not in broken]
    expected = torch.stack([torch.from_numpy(decode_file(file, 32).copy()) for file in good]).int()
    train = {int(r): i for s in (source.train, source.val) for r, i in zip(s.rows_N, s.images_NHWC, strict=True)}
    loaded = torch.stack([train[row] for row in sorted(train)] + list(source.test.images_NHWC)).int()
    difference = (loaded - expected).float().abs()
    if backend == "torch":
        assert not difference.any()
    else:
        assert 0 < difference.mean() < 0.3 and difference.max() <= 8

    batches = list(Loader(source.train, config, source, 32, 0, torch.device("cpu"), [0]).epoch(0))
    assert sum(len(batch.labels_B) for batch in batches) == 72
    pixels = torch.cat([source.train.images_NHWC, source.val.images_NHWC]).reshape(-1, 3).double() / 255
    assert torch.allclose(pixels.mean(0), torch.tensor(source.mean).double())
    assert torch.allclose(pixels.std(0, correction=0), torch.tensor(source.std).double())


def test_many_broken_files_are_counted(root, data_config, caplog):
    for number in range(21):
        (root / "train" / "apple" / f"broken {number:02}.jpg").write_bytes(b"no image")
    load(data_config("folder", root=str(root), pipeline="torch"))
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "left out train/apple/broken 00.jpg: cannot identify image file"
    assert len(told) == 21 and told[-1] == "left out 1 image more that cannot be decoded"


def test_dali_says_nothing_of_a_damaged_file_even_while_batches_wait(tmp_path, capfd):
    """libjpeg prints past Python as soon as it decodes, which ahead of time would be while nobody listens."""
    dali = pytest.importorskip("dicedist.data.dali")
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{number:02}.jpg" for number in range(20)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (200, 200, 3), np.uint8)).save(file)
    whole = files[10].read_bytes()
    files[10].write_bytes(whole[: len(whole) // 2] + b"\xff\x00" * 50)
    decoded = []
    for images in dali.decode([files[start : start + 4] for start in range(0, 20, 4)], 32, 1):
        time.sleep(0.1)
        decoded.append(images is not None)
    assert decoded == [True, True, False, True, True]
    assert capfd.readouterr().err == ""


def test_refused_then_skipped_then_repaired(root, data_config):
    break_three(root)
    says = r"^3 images cannot be decoded \(train/apple/cut.jpg: .+\): remove them, or write data.on_corrupt=skip$"
    with pytest.raises(ValueError, match=says):
        load(data_config("folder", root=str(root), on_corrupt="refuse"))
    assert len(load(data_config("folder", root=str(root))).test) == 30
    for file in ("train/apple/cut.jpg", "train/chair/text.png", "test/bear/empty.jpg"):
        shutil.copy(next((root / "test" / "bear").glob("*.png")), root / file)
    source = load(data_config("folder", root=str(root), on_corrupt="refuse", split="full"))
    assert [len(source.train), len(source.test)] == [92, 31]


def test_decoded_once_and_again_when_a_file_changes(root, data_config, fresh_home, monkeypatch):
    config = data_config("folder", root=str(root), size=48)
    first = load(config)
    assert first.train.inputs_R.shape[1:] == (48, 48, 3)
    with monkeypatch.context() as patch:
        patch.setattr("dicedist.data.sets.folder.decode", lambda *_: pytest.fail("decoded again"))
        assert load(config).data_digest == first.data_digest
    Image.new("RGB", (50, 50), "red").save(root / "train" / "apple" / "001.png")
    assert load(config).data_digest != first.data_digest
    assert len(list(fresh_home.glob("prepared/*/*/"))) == 1  # the outdated one is gone
    assert first.train.images_NHWC.any()  # but still complete for its current users


def test_every_kind_keeps_its_colors(originals, tmp_path):
    image = Image.fromarray(originals["apple"][0]).resize((96, 64), Image.Resampling.BICUBIC)
    wanted = {kind: image.convert("L").convert("RGB") if kind[0] in "g1" else image for kind in [*KINDS, "color.gif"]}
    for kind in wanted:
        save(image, tmp_path / kind.split(".")[0], kind)
        (path,) = tmp_path.iterdir()
        ours = decode_file(path, 32)
        path.unlink()
        reference = np.asarray(wanted[kind].crop((16, 0, 80, 64)).resize((32, 32), Image.Resampling.BILINEAR))
        tolerance = 12 if kind in ("palette.png", "color.gif", "color.webp") else 4
        assert np.abs(ours.astype(int) - reference).mean() < tolerance, kind


def remove(root, path):
    shutil.rmtree(root / path)


def empty(root, path):
    remove(root, path)
    (root / path).mkdir()


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (remove, "test", r"test does not exist: data=folder needs train/<class>/\*.jpg and test/<class>/\*.jpg"),
        (remove, "train", "train does not exist: data=folder needs"),
        (empty, "train", "train holds 0 class folders, at least two are needed"),
        (empty, "train/bear", r"bear holds no images \(.bmp, .gif"),
        (remove, "test/bear", "test lacks the class folders bear, which train has"),
        (remove, "train/bear", "test has the class folders bear, which train lacks"),
    ],
)
def test_folder_that_is_not_laid_out(root, data_config, change, path, says):
    change(root, path)
    with pytest.raises(ValueError, match=says):
        load(data_config("folder", root=str(root)))


@pytest.mark.parametrize("data", ["folder", "files"])
def test_folders_of_classes_alone_are_divided(root, data_config, data, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(root / "train", flat)
    config = data_config(data, root=str(flat), pipeline="torch", test_fraction=0.2, split="full")
    source = load(config)
    assert source.class_names == CLASSES
    assert source.train.labels_N.bincount().tolist() == [24, 24, 24]
    assert source.test.labels_N.bincount().tolist() == [6, 6, 6]
    seen = [image.numpy().tobytes() for split in (source.train, source.test) for image in split.images_NHWC]
    assert len(set(seen)) == 90  # none in both
    assert load(config).data_digest == source.data_digest
    other = load(replace(config, split_seed=1))
    assert not other.test.images_NHWC.equal(source.test.images_NHWC)
    assert len(load(replace(config, test_fraction=0.5)).test) == 45


def test_a_class_too_small_to_be_divided(root, data_config, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(root / "train", flat)
    for file in sorted((flat / "bear").iterdir())[2:]:
        file.unlink()
    line = r"bear holds 2 images, of which data.test_fraction=0.2 leaves 2 to train on and 0 to test on: add images"
    with pytest.raises(ValueError, match=line):
        load(data_config("folder", root=str(flat)))


def test_class_of_corrupt_images_only(root, data_config):
    for file in (root / "test" / "bear").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="^test/bear: none of its images can be decoded$"):
        load(data_config("folder", root=str(root)))
