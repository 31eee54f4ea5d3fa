"""Vectors: every format reads alike, statistics are those of training, what cannot be used is named in one line."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.sets.vectors import read_table
from dicedist.data.sources import load, vector_columns

CPU = torch.device("cpu")
X = np.random.default_rng(0).normal(3, 2, (40, 3)).astype(np.float32)
Y = np.arange(40) % 4
EMPTY = X.astype(str)  # two cells are
EMPTY[[3, 17], 2] = "", "n/a"


def write(path, x=X, y=Y, compression="snappy", **more):
    if path.suffix == ".npz":
        np.savez(path, x=x, y=y, **more)
    elif path.suffix == ".safetensors":
        save_file({"x": x, "y": y, **more}, path)
    elif path.suffix == ".csv":
        columns = {**{f"v{place}": x[:, place] for place in range(x.shape[1])}, "label": y, **more}
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {**{f"v{place}": x[:, place] for place in range(x.shape[1])}, "label": y, **more}
        parquet.write_table(pyarrow.table(columns), path, compression=compression)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".csv", ".parquet"])
def test_every_format_reads_alike(tmp_path, fresh_home, data_config, suffix):
    folder = tmp_path / suffix[1:]
    folder.mkdir()
    write(folder / f"train{suffix}")
    write(folder / f"test{suffix}", X[:8] + 1, Y[:8])
    source = load(data_config("vectors", root=str(folder), split="full"))
    assert (source.kind, source.shape, source.class_names) == ("vectors", (3,), ["0", "1", "2", "3"])
    assert np.array_equal(source.train.take(torch.arange(40)), X) and np.array_equal(source.train.labels_N, Y)
    assert np.array_equal(source.test.take(torch.arange(8)), X[:8] + 1)
    assert vector_columns(data_config("vectors", root=str(folder)))[0] == 3


def test_statistics_are_those_of_the_training_rows(tmp_path, fresh_home, data_config):
    constant = np.concatenate([X, np.full((40, 1), 7, np.float32)], 1)
    write(tmp_path / "train.npz", constant)
    write(tmp_path / "test.npz", constant[:8] * 5, Y[:8])
    source = load(data_config("vectors", root=str(tmp_path), split="full"))
    (views, _), *_ = evaluation_batches(source.test, source, 100, CPU)
    expected = StandardScaler().fit(constant.astype(np.float64)).transform(constant[:8] * 5)
    assert np.allclose(views, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("digits", datasets.load_digits), ("wine", datasets.load_wine), ("breast_cancer", datasets.load_breast_cancer)],
)
def test_what_scikit_learn_carries(fresh_home, data_config, name, theirs):
    source, bunch = load(data_config(name, split="full")), theirs()
    ours = torch.cat(
        [source.train.take(torch.arange(len(source.train))), source.test.take(torch.arange(len(source.test)))]
    )
    labels = torch.cat([source.train.labels_N, source.test.labels_N])
    order, expected = np.lexsort(np.c_[ours, labels].T), np.c_[bunch.data.astype(np.float32), bunch.target]
    assert np.array_equal(np.c_[ours, labels][order], expected[np.lexsort(expected.T)])
    assert source.class_names == [str(word) for word in bunch.target_names]
    shares = source.test.labels_N.bincount() / labels.bincount()
    assert torch.allclose(shares, torch.tensor(0.2), atol=0.02)
    again = load(data_config(name, split="full"), labels_only=True)
    assert again.test.labels_N.equal(source.test.labels_N) and again.data_digest == source.data_digest
    other = load(data_config(name, split="full", split_seed=1), labels_only=True)
    assert other.data_digest != source.data_digest


def test_words_name_classes_and_a_column_may_name_the_split(tmp_path, fresh_home, data_config):
    split = np.where(np.arange(40) < 30, "train", "test")
    file = write(tmp_path / "all.csv", y=np.array(["elm", "ash", "oak", "fir"])[Y], split=split)
    source = load(data_config("vectors", root=str(file), split="full"))
    assert source.class_names == ["ash", "elm", "fir", "oak"]
    assert (len(source.train), len(source.test)) == (30, 10)
    assert source.train.labels_N[:4].tolist() == [1, 0, 3, 2]
    assert np.array_equal(source.test.take(torch.arange(10)), X[30:])


def loader(source, config, **more):
    return Loader(source.train, config, source, 16, 0, CPU, **{"members": [0], **more})


def test_noise_is_drawn_by_step_and_is_the_same_anywhere(tmp_path, fresh_home, data_config):
    config = data_config("vectors", root=str(write(tmp_path / "all.npz")), noise=0.5, split="full")
    source = load(config)
    plain = next(loader(source, dataclasses.replace(config, noise=0)).epoch(1)).images[0]
    whole = list(loader(source, config).epoch(1))
    noise = whole[0].images[0] - plain
    assert 0.3 < noise.std() < 0.7 and not noise.equal(whole[1].images[0] - plain)
    (late,) = loader(source, config).epoch(1, start=1)
    assert late.images[0].equal(whole[1].images[0])
    half = next(loader(source, config, replica=1, replicas=2).epoch(1))
    assert half.images[0].equal(whole[0].images[0][8:])
    own = next(loader(source, dataclasses.replace(config, per_member=True), members=[0, 1]).epoch(1)).images
    assert len(own) == 2 and not own[0].equal(own[1])


@pytest.mark.parametrize(
    ("name", "made", "line"),
    [
        ("a.npz", {"x": np.where(X > 7, np.nan, X)}, "a.npz: row .*, value .* is nan: fill or remove the row"),
        ("a.npz", {"y": np.array(["a", "b"] * 20)}, "y is <U1 [40], write whole numbers [N] from 0, and class_names"),
        ("a.npz", {"y": Y[:30]}, "40 vectors and 30 labels, write one for each"),
        ("a.npz", {"y": Y - 1}, "a.npz: labels from -1 to 2, of 3 classes"),
        ("a.npz", {"x": X[0]}, "x has the shape [3], write vectors [N, V]"),
        ("a.npz", {"x": np.array([X[0], X[0, :2]] * 20, object)}, "x holds objects, as rows of different widths are"),
        ("a.npz", {"x": X.astype(str)}, "a.npz: x is <U32, write numbers"),
        ("a.npz", {"y": Y * 0}, "a.npz holds 1 classes, at least two are needed"),
        ("a.csv", {"x": np.array([["1", "x", "2"]] * 40)}, "a.csv: column v1 holds no numbers"),
        ("a.csv", {"x": np.array([["1", "", "2"]] * 40)}, "a.csv: column v1 holds no numbers"),
        ("a.csv", {"x": EMPTY}, "a.csv: column v2 has no number in 2 rows (3, 17): fill or remove them"),
        ("a.csv", {"split": np.array(["dev"] * 40)}, "the column split holds 'dev', write train or test"),
        ("a.csv", {"split": np.array(["train"] * 40)}, "0 of 40 rows are for the test; some must be, not all"),
    ],
)
def test_refusals(tmp_path, fresh_home, data_config, name, made, line):
    file = write(tmp_path / name, **made)
    pattern = re.escape(line).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern) as error:
        load(data_config("vectors", root=str(file)))
    assert "\n" not in str(error.value)


def test_more_refusals(tmp_path, fresh_home, data_config):
    def refused(line, root=tmp_path, **changes):
        with pytest.raises(ValueError, match=re.escape(line)):
            load(data_config("vectors", root=str(root), **changes))

    refused("does not exist: write data.root=FILE", tmp_path / "none")
    refused("holds 0 files train.*, one is needed")
    refused("a.txt: vectors are read from .npz", write(tmp_path / "a.csv").rename(tmp_path / "a.txt"))
    write(tmp_path / "train.npz")
    write(tmp_path / "test.npz", X[:, :2])
    refused(f"{tmp_path / 'test.npz'} has vectors of 2 values, {tmp_path / 'train.npz'} of 3")
    write(tmp_path / "test.npz", y=Y + 1)
    refused("test.npz: labels from 1 to 4, of 4 classes")
    identities = write(tmp_path / "identities.npz", y=Y + 2_000_000_000)
    refused("one of them is 2000000003: number the classes from 0, or write class_names in it", identities)
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("a,label\n1,x\n1,2,x\n")
    refused("ragged.csv: line 3 has 3 values, the header names 2", ragged)
    refused("has no labels", write(tmp_path / "b.csv"), label_column="kind")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(b"PK not a zip")
    refused("damaged.npz cannot be read", damaged)
    words = write(tmp_path / "words.parquet", y=np.array(["cat", "dog"] * 20), compression="none")
    words.write_bytes(words.read_bytes().replace(b"cat", b"ca\xff"))
    refused("words.parquet cannot be read", words)
    with pytest.raises(ValueError, match="pip install 'dicedist\\[vectors\\]'"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        read_table(tmp_path / "x.parquet", "label")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_matched_by_their_names(tmp_path, fresh_home, data_config, suffix):
    write(tmp_path / f"train{suffix}")
    columns = {"label": Y[:8], "v2": X[:8, 2], "v0": X[:8, 0], "v1": X[:8, 1]}
    write(tmp_path / f"test{suffix}", X[:8, :0], **columns)
    source = load(data_config("vectors", root=str(tmp_path), split="full"))
    assert np.array_equal(source.test.take(torch.arange(8)), X[:8]) and source.columns == ("v0", "v1", "v2")
    for line, names in (("lacks the column v1", ["v0", "v2"]), ("has the column w, which", ["v0", "v1", "v2", "w"])):
        write(tmp_path / f"test{suffix}", X[:8, :0], label=Y[:8], **{name: X[:8, 0] for name in names})
        with pytest.raises(ValueError, match=f"test{suffix} {line}.*the training data"):
            load(data_config("vectors", root=str(tmp_path), split="full"))
    assert np.array_equal(read_table(tmp_path / f"train{suffix}", columns=["v2", "v0", "v1"])[0], X[:, [2, 0, 1]])


def test_missing_labels_are_refused(tmp_path, fresh_home, data_config):
    def refused(line, file):
        with pytest.raises(ValueError, match=re.escape(line)):
            load(data_config("vectors", root=str(file)))
        read_table(file)  # to predict, a table needs none

    labels = np.array(["elm", "ash", "oak", "fir"])[Y]
    labels[[3, 7]] = "", "nan"
    refused("a.csv: no label in 2 rows (3, 7): fill or remove them", write(tmp_path / "a.csv", y=labels))
    pyarrow = pytest.importorskip("pyarrow")
    for missing, kind in ((None, pyarrow.string()), (float("nan"), pyarrow.float64()), (None, pyarrow.int64())):
        values = [missing if place == 5 else ("a" if kind == pyarrow.string() else 1) for place in range(40)]
        refused("b.parquet: no label in 1 row (5)", write(tmp_path / "b.parquet", y=pyarrow.array(values, kind)))
