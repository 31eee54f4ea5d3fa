"""A user's own Dataset: only with trust, images or vectors, and one line for whatever it returns wrongly."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from dicedist.config import compose_config, targets
from dicedist.data.pipeline import Loader
from dicedist.data.sets import own
from dicedist.data.sources import load, vector_columns

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 20, 24, 3), dtype=np.uint8)
VECTORS = RNG.normal(5, 2, (40, 3))


class Pictures(Dataset):
    class_names = ["ash", "elm"]

    def __init__(self, split, root):
        self.rows = range(30) if split == "train" else range(30, 40)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return Image.fromarray(PIXELS[row]), row % 2


class Numbers(Pictures):
    @property
    def labels(self):
        return [row % 2 for row in self.rows]

    def __getitem__(self, index):
        return torch.from_numpy(VECTORS[self.rows[index]]), torch.tensor(self.rows[index] % 2)


class Wrong(Pictures):
    answer = None

    def __getitem__(self, index):
        return self.answer


@pytest.fixture
def config(data_config, monkeypatch):
    monkeypatch.setattr(targets, "import_module", lambda name: __import__("types").SimpleNamespace(**globals()))
    own.made.cache_clear()
    return lambda kind, **more: data_config(
        "own", **{"_target_": f"mine.{kind.__name__}", "trusted": True, "split": "full", "size": 16, **more}
    )


def test_images_and_their_keyed_order(config):
    settings = config(Pictures, pipeline="torch")
    source = load(settings)
    assert (source.kind, source.class_names, len(source.train), len(source.test)) == ("images", ["ash", "elm"], 30, 10)
    assert source.train.labels_N.tolist() == [row % 2 for row in range(30)] and vector_columns(settings) is None
    whole = list(Loader(source.train, settings, source, 8, 0, torch.device("cpu"), [0]).epoch(1))
    late = list(Loader(source.train, settings, source, 8, 0, torch.device("cpu"), [0]).epoch(1, 2))
    assert whole[2].images[0].equal(late[0].images[0]) and whole[0].images[0].shape == (8, 3, 16, 16)


def test_vectors(config):
    source = load(config(Numbers))
    assert (source.kind, source.shape, vector_columns(config(Numbers))) == ("vectors", (3,), (3, None))
    assert np.allclose(source.mean, VECTORS[:30].mean(0), atol=1e-5)
    assert np.allclose(source.test.take(torch.arange(10)), VECTORS[30:])


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (5, "[0] is of type int, no pair"),
        ((PIXELS[0], 1, 2), "[0] is a group of 3, no pair"),
        ((PIXELS[0], -1), "[0] has the class '-1': return a PIL image"),
        ((PIXELS[0], "ash"), "[0] has the class 'ash': return a PIL image"),
        ((PIXELS[0].astype(np.float32), 1), "[0] is float32 [20, 24, 3]: return a PIL image"),
        ((np.array([1.0, np.nan]), 1), "[0] holds a value that is no finite number"),
    ],
)
def test_wrong_answers(config, monkeypatch, answer, line):
    monkeypatch.setattr(Wrong, "answer", answer)
    with pytest.raises(ValueError, match=re.escape(line)):
        load(config(Wrong))


class Raising(Pictures):
    def __getitem__(self, index):
        raise KeyError("leaf\n17")


class Uneven(Numbers):
    def __getitem__(self, index):
        return VECTORS[0][: 2 + index % 2], index % 2


class Lying(Pictures):
    @property
    def labels(self):
        return [1] * len(self)


class Lost(Pictures):
    def __init__(self, split, root):
        open("/nowhere/leaves.txt")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Raising, "Raising('train')[0] raises KeyError: 'leaf\\n17'"),
        (Uneven, "Uneven('train') returns inputs of the shapes [(2,), (3,)]: return one width"),
        (Lying, "Lying('train')[0] has the class 0, and its labels say 1"),
        (Lost, "mine.Lost cannot be made of ('train', None): FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_classes_that_go_wrong(config, kind, line):
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        load(config(kind))
    assert "\n" not in str(raised.value)


def test_refusals(config, monkeypatch):
    with pytest.raises(ValueError, match="runs its code: add data.trusted=true"):
        load(config(Pictures, trusted=False))
    with pytest.raises(ValueError, match="cannot import data._target_=mine.Nobody"):
        load(config(type("Nobody", (), {})))
    with pytest.raises(ValueError, match="data=own: write data=own data._target_="):
        compose_config(["data=own"])
    with pytest.raises(ValueError, match="data=cifar100: write data=own"):
        compose_config(["data._target_=mine.Pictures"])
