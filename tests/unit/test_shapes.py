"""The generated data: the same bytes everywhere, balanced, quick, and only the shape shows the class."""

import hashlib
import time

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dicedist.data.sets import shapes


@pytest.fixture(scope="module")
def splits():
    return {split: shapes.generate(split) for split in shapes.COUNTS}


@pytest.mark.parametrize(
    ("split", "sha256"),
    [
        ("train", "4214a0855e8337b258f3be0f8fec65591c6ad15e2a9bcd6bd189c05fbc9d77e4"),
        ("test", "6115c0c077606849e94ebc9541042af127beb76860edead5f8179f8650a0e9ff"),
    ],
)
def test_the_same_bytes_on_every_machine(splits, split, sha256):
    images, labels = splits[split]
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    assert images.flags.c_contiguous
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == sha256


def test_seeds_differ(splits):
    images, labels = shapes.generate("test", seed=1)
    assert (images != splits["test"][0]).mean() > 0.9
    assert (labels != splits["test"][1]).mean() > 0.8


def test_classes_are_balanced(splits):
    for split, count in shapes.COUNTS.items():
        images, labels = splits[split]
        assert images.shape == (count, 32, 32, 3)
        assert np.bincount(labels).tolist() == [count // 10] * len(shapes.CLASS_NAMES)


def test_mean_and_std_are_those_of_the_training_images(splits):
    pixels = splits["train"][0].reshape(-1, 3) / 255
    np.testing.assert_allclose(pixels.mean(0), shapes.MEAN, atol=6e-4)
    np.testing.assert_allclose(pixels.std(0), shapes.STD, atol=6e-4)


def test_whole_set_in_under_three_seconds():
    start = time.process_time()
    for split in shapes.COUNTS:
        shapes.generate(split)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("name", shapes.CLASS_NAMES)
def test_a_flip_keeps_the_class(name):
    u, v = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 1000)).astype(np.float32)
    np.testing.assert_allclose(shapes.SHAPES[name](u, v), shapes.SHAPES[name](u, -v), atol=1e-6)


def test_area_does_not_tell_the_class():
    rng = np.random.Generator(np.random.PCG64(0))
    areas = [shapes._object(rng, np.full(400, label)).sum((1, 2, 3)).mean() for label in range(len(shapes.CLASS_NAMES))]
    assert max(areas) / min(areas) < 1.1


def _histogram(images):
    return np.stack([(images // 32 == level).mean((1, 2)) for level in range(8)], axis=-1)


def _border(images):
    frame = np.ones((32, 32), bool)
    frame[3:-3, 3:-3] = False
    return images[:, frame]


def _moments(images):
    return np.concatenate([images.mean((1, 2)), images.std((1, 2))], axis=1)


@pytest.mark.parametrize("statistic", [_histogram, _border, _moments])
def test_nuisances_do_not_tell_the_class(splits, statistic):
    """On color, brightness, texture and clutter at the border, a linear classifier stays near chance, 10%."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))
    images, labels = splits["train"]
    classifier.fit(statistic(images).reshape(len(images), -1), labels)
    images, labels = splits["test"]
    assert classifier.score(statistic(images).reshape(len(images), -1), labels) < 0.13
