"""Corruptions: what each operator does by independent means, the same at every call and at any size; shifted sets."""

import colorsys
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from dicedist.data import corruptions
from dicedist.data.corruptions import BLOCK, OPERATORS, SEVERITIES, corrupt


def photographs(N=6, size=32, seed=0):
    """Smooth colors with edges, as photographs have."""
    draws = np.random.default_rng(seed)
    coarse = draws.integers(0, 256, (N, 5, 5, 3)).astype(np.uint8)
    resized = [Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR) for image in coarse]
    images = np.stack([np.asarray(image) for image in resized])
    images[:, size // 2 :, size // 3 : size // 2] = 20
    return images


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_keyed_and_keeps_shape_at_any_size(name):
    for size in (24, 32, 47):
        images = photographs(3, size)
        found = corrupt(images, name, 3)
        assert found.shape == images.shape and found.dtype == np.uint8
        assert (found == corrupt(images, name, 3)).all()
        assert (found != images).any()
    assert (corrupt(images[1:], name, 5) != corrupt(images, name, 1)[1:]).any()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_part_of_a_whole_is_corrupted_as_in_the_whole(name):
    images = photographs(BLOCK + 4, 16)
    whole = corrupt(images, name, 2)
    assert (corrupt(images[BLOCK:], name, 2, first=BLOCK) == whole[BLOCK:]).all()


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name not in ("saturate", "elastic_transform", "spatter")]
)
def test_severity_five_changes_more_than_severity_one(name):
    """Not so in CIFAR-C itself: saturation falls before it rises, elastic strength moves from affine to local."""
    images = photographs(20)
    change = [np.abs(corrupt(images, name, severity).astype(float) - images).mean() for severity in (1, 5)]
    assert change[1] > change[0]


@pytest.mark.parametrize(("name", "strengths"), [("gaussian_noise", (0.04, 0.1)), ("speckle_noise", (0.06, 0.2))])
def test_noise_has_the_deviation_of_cifar_c(name, strengths):
    gray = np.full((40, 32, 32, 3), 128, np.uint8)
    for severity, strength in zip((1, 5), strengths, strict=True):
        deviation = corrupt(gray, name, severity).std() / 255
        expected = strength * (128 / 255 if name == "speckle_noise" else 1)
        assert deviation == pytest.approx(expected, rel=0.03)


def test_shot_and_impulse_noise_have_their_rates():
    gray = np.full((40, 32, 32, 3), 128, np.uint8)
    assert corrupt(gray, "shot_noise", 5).std() / 255 == pytest.approx((128 / 255 / 50) ** 0.5, rel=0.03)
    spoiled = corrupt(gray, "impulse_noise", 5)
    assert [(spoiled == value).mean() for value in (0, 255)] == pytest.approx([0.035, 0.035], rel=0.05)


def hsv(images, change):
    """Pixel by pixel through the standard library."""
    out = []
    for pixel in images.reshape(-1, 3) / 255:
        out.append(colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))))
    return np.reshape(out, images.shape) * 255


def test_brightness_and_saturation_equal_colorsys():
    images = photographs(1, 12)
    images[0, 0, :3] = [[0, 0, 0], [90, 90, 90], [255, 255, 255]]  # without hue, without saturation
    bright = hsv(images, lambda h, s, v: (h, s, min(v + 0.3, 1)))
    assert corrupt(images, "brightness", 5) == pytest.approx(bright, abs=0.51)
    for severity, (factor, added) in ((1, (0.3, 0)), (4, (2, 0.1))):
        changed = hsv(images, lambda h, s, v, f=factor, a=added: (h, min(s * f + a, 1), v))
        assert corrupt(images, "saturate", severity) == pytest.approx(changed, abs=0.51)


def test_contrast_and_blur_by_plain_formulas():
    images = photographs(2)
    mean = images.mean((1, 2), keepdims=True)
    assert corrupt(images, "contrast", 5) == pytest.approx(np.clip((images - mean) * 0.15 + mean, 0, 255), abs=0.51)
    blurred = [ndimage.gaussian_filter(image.astype(float), (1, 1, 0), mode="nearest", truncate=3) for image in images]
    assert corrupt(images, "gaussian_blur", 5) == pytest.approx(np.stack(blurred), abs=0.51)


def test_defocus_equals_a_direct_convolution():
    images = photographs(2)
    rows, columns = np.ogrid[-2:3, -2:3]
    disc = (rows**2 + columns**2 <= 1.5**2).astype(float)  # at severity 5 the softening of 0.1 pixels is nothing
    kernel = disc / disc.sum()
    expected = ndimage.convolve(images.astype(float), kernel[None, :, :, None], mode="mirror")
    assert corrupt(images, "defocus_blur", 5) == pytest.approx(expected, abs=0.51)


def test_jpeg_and_pixelate_are_pillows():
    images = photographs(1)
    file = io.BytesIO()
    Image.fromarray(images[0]).save(file, "JPEG", quality=40)
    assert (corrupt(images, "jpeg_compression", 5)[0] == np.asarray(Image.open(file))).all()
    small = Image.fromarray(images[0]).resize((20, 20), Image.Resampling.BOX)  # 0.65 of 32
    assert (corrupt(images, "pixelate", 5)[0] == np.asarray(small.resize((32, 32), Image.Resampling.BOX))).all()


def glass_of_one(image, severity, draws):
    """CIFAR-C's glass blur of one image, in whole gray levels, written from the published loop.

    Its swap `x[a], x[b] = x[b], x[a]` copies through views, so x[a] takes the value of x[b] and x[b] stays.
    """
    deviation, times = {1: (0.05, 1), 2: (0.25, 1), 3: (0.4, 1), 4: (0.25, 2), 5: (0.4, 2)}[severity]

    def blurred(x):
        return ndimage.gaussian_filter(x.astype(float), (deviation, deviation, 0), mode="nearest").astype(np.uint8)

    x = blurred(image)
    for _ in range(times):
        for row in range(31, 1, -1):
            for column in range(31, 1, -1):
                down, right = draws.integers(-1, 1, 2)
                x[row, column] = x[row + down, column + right]
    return blurred(x)


def zoom_of_one(image, severity):
    """CIFAR-C's zoom blur of one image by scipy's zoom, in whole gray levels."""
    height, factors = len(image), np.arange(1, [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1], 0.01)
    total = image.astype(float)
    for factor in factors:
        kept = int(np.ceil(height / factor))
        middle = slice((height - kept) // 2, (height - kept) // 2 + kept)
        zoomed = ndimage.zoom(image[middle, middle].astype(float), (factor, factor, 1), order=1)
        first = (len(zoomed) - height) // 2
        total += zoomed[first : first + height, first : first + height]
    return (total / (len(factors) + 1)).astype(np.uint8)


def mean_change(before, after):
    return np.abs(after.astype(float) - before).mean()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass_is_as_strong_as_cifar_cs(severity):
    images, draws = photographs(40), np.random.default_rng(7)
    expected = np.stack([glass_of_one(image, severity, draws) for image in images])
    found = corrupt(images, "glass_blur", severity)
    assert mean_change(images, found) == pytest.approx(mean_change(images, expected), rel=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("size", [32, 45])
def test_zoom_equals_cifar_cs(severity, size):
    images = photographs(4, size)
    expected = np.stack([zoom_of_one(image, severity) for image in images])
    found = corrupt(images, "zoom_blur", severity)
    assert np.abs(found.astype(int) - expected).max() <= 1  # rounded here, truncated there
    assert mean_change(images, found) == pytest.approx(mean_change(images, expected), rel=0.05)


@pytest.mark.parametrize("border", ["nearest", "reflect"])
def test_sampling_equals_scipy(border):
    x = photographs(2).astype(np.float32) / 255
    draws = np.random.default_rng(0)
    rows, columns = (draws.uniform(-6, 38, (2, 32, 32)).astype(np.float32) for _ in range(2))
    found = corruptions.sampled(x, rows, columns, border)
    for n in range(2):
        for color in range(3):
            expected = ndimage.map_coordinates(x[n, ..., color], [rows[n], columns[n]], order=1, mode=border)
            assert found[n, ..., color] == pytest.approx(expected, abs=1e-4)


def test_a_rotation_by_scipy():
    images = photographs(12)
    found = corrupt(images, "rotation", 2)
    for image, turned in zip(images, found, strict=True):
        either = [
            ndimage.rotate(image.astype(float), sign * 30, reshape=False, order=1, mode="nearest") for sign in (1, -1)
        ]
        assert min(np.abs(turned - one).max() for one in either) < 1


@pytest.mark.parametrize(
    ("name", "severity", "line"), [("fog", 6, "severity 6 of fog: write 1, 2"), ("mist", 1, "mist")]
)
def test_unknown_names_and_severities_are_refused(name, severity, line):
    with pytest.raises(ValueError, match=line):
        corrupt(photographs(1), name, severity)


def test_all_nineteen_of_cifar_c_are_there():
    assert len(corruptions.CORRUPTIONS) == 15 and len(corruptions.EXTRA) == 4 and SEVERITIES == (1, 2, 3, 4, 5)


class TestShift:
    """The shifted images that `evaluate shift=` opens."""

    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        from dicedist.data.sources import Source, Split

        monkeypatch.setenv("DICEDIST_DATA", str(tmp_path / "home"))
        images, labels = torch.from_numpy(photographs(12)), torch.arange(12) % 3
        nothing = Split(images[:0], labels[:0])
        names = ["ant", "bee", "cow"]
        return Source("cifar10", names, (0, 0, 0), (1, 1, 1), 32, nothing, nothing, Split(images, labels), "digest")

    def test_corrupted_sets_are_kept(self, source, monkeypatch):
        from dicedist.data import shift

        opened = shift.open_shift("corruptions", [2, 5], 6, source, None)
        name, severity, split = next(opened.sets)
        assert (name, severity, len(split)) == ("gaussian_noise", 2, 6)
        assert split.labels_N.tolist() == [0, 1, 2, 0, 1, 2]
        expected = corrupt(source.test.images_NHWC[:6].numpy(), "gaussian_noise", 2)
        assert (split.images_NHWC.numpy() == expected).all()
        monkeypatch.setattr(shift, "corrupt", None)  # made once
        again = next(shift.open_shift("corruptions", [2], 6, source, None).sets)[2]
        assert again.images_NHWC.equal(split.images_NHWC)

    def test_official_files(self, source, tmp_path):
        from dicedist.data.shift import open_shift

        folder = tmp_path / "CIFAR-10-C"
        folder.mkdir()
        images = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
        images[20_000:30_000] = 3
        np.save(folder / "labels.npy", np.tile(np.arange(10), 5_000).astype(np.uint8))
        with pytest.raises(ValueError, match="put the folder CIFAR-10-C"):
            open_shift("cifar_c", [3], 10, source, tmp_path / "elsewhere")
        opened = open_shift("cifar_c", [3], 10, source, tmp_path)
        ((name, severity, split),) = opened.sets
        assert (name, severity, split.labels_N.tolist()) == ("fog", 3, list(range(10)))
        assert (split.images_NHWC == 3).all()

    def test_official_files_of_a_part_of_the_test_set(self, source, tmp_path):
        from dicedist.data.shift import open_shift
        from dicedist.data.sources import limited

        folder = tmp_path / "CIFAR-10-C"
        folder.mkdir()
        images = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
        images[20_004] = 7
        np.save(folder / "labels.npy", np.tile(np.arange(10), 5_000).astype(np.uint8))
        part = replace(source, test=limited(source.test, 5))
        assert part.test.rows_N.tolist() == [0, 1, 2, 3, 4]
        opened = open_shift("cifar_c", [3], None, part, tmp_path)
        ((_, _, split),) = opened.sets
        assert split.labels_N.tolist() == list(range(5)) and (split.images_NHWC[4] == 7).all()
        assert opened.clean.images_NHWC.equal(part.test.images_NHWC)

    def test_a_folder_of_classes(self, source, tmp_path):
        from dicedist.data.shift import open_shift

        for label in ("bee", "cow"):
            (tmp_path / "mine" / label).mkdir(parents=True)
            Image.fromarray(photographs(1, 40)[0]).save(tmp_path / "mine" / label / "one.png")
        ((name, _, split),) = open_shift(str(tmp_path / "mine"), [1], None, source, None).sets
        assert name == "mine" and split.labels_N.tolist() == [1, 2] and split.images_NHWC.shape == (2, 32, 32, 3)

    @pytest.mark.parametrize(
        ("kind", "severities", "line"),
        [
            ("corruptions", [6], r"shift_severities=\[6\]: write some of \[1, 2, 3, 4, 5\]"),
            ("corruptiosn", [1], "shift=corruptiosn: there is no such folder; write one of corruptions"),
            ("{tmp}/flat", [1], "images need labels, so write a folder with a folder per class"),
            ("{tmp}/other", [1], "dog is no class of the run"),
        ],
    )
    def test_one_line_says_what_to_write(self, source, tmp_path, kind, severities, line):
        from dicedist.data.shift import open_shift

        for place in ("flat", "other/dog", "other/ant"):
            (tmp_path / place).mkdir(parents=True)
            Image.fromarray(photographs(1)[0]).save(tmp_path / place / "one.png")
        with pytest.raises(ValueError, match=line):
            open_shift(kind.format(tmp=tmp_path), severities, None, source, None)
