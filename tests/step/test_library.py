"""The public Ensemble: every kind of input gives the same answers, and what cannot be answered is one sentence."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dicedist
from dicedist import Ensemble, Prediction, metrics
from dicedist.data.sets.folder import decode_file
from dicedist.evaluation import formats
from tests.support.tiny import train

SIZE, NAMES = 16, ["cat", "dog", "owl"]
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(len(NAMES)))


@pytest.fixture(scope="module")
def members():
    made = [network(seed) for seed in range(3)]
    for member in made:
        member(torch.zeros(1, 3, SIZE, SIZE))
    return made


@pytest.fixture(scope="module")
def ensemble(members):
    return Ensemble.from_members(members, NAMES, SIZE, MEAN, STD)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(256, size=(7, SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = ("ensemble.size=3", "data.split=full", "max_steps=2", "network._target_=tests.support.networks.Small")
    train(folder, *settings, "network.trusted=true")
    return folder / "tiny"


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(found, field.name), value, atol=1e-5, rtol=1e-4)


def test_answers_are_those_of_the_formulas(members, ensemble, pixels):
    """Written out in numpy, for every input by itself."""
    found = ensemble.predict(pixels)
    assert isinstance(found, Prediction) and len(found) == 7 and found.member_logits.shape == (3, 7, 3)
    for n, image in enumerate(pixels):
        x = torch.from_numpy(((image / 255 - MEAN) / STD).astype(np.float32)).permute(2, 0, 1)[None]
        logits = np.array([member(x)[0].tolist() for member in members])
        p_MK = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        p_K = p_MK.mean(0)
        entropy = -(p_K * np.log(p_K)).sum()
        votes = p_MK.argmax(1)
        expected = {
            "probabilities": p_K,
            "confidence": p_K.max(),
            "ood_score": p_K.max(),
            "entropy": entropy,
            "mutual_information": entropy + (p_MK * np.log(p_MK)).sum(1).mean(),
            "disagreement": np.mean([votes[i] != votes[j] for i, j in ((0, 1), (0, 2), (1, 2))]),
        }
        for name, value in expected.items():
            assert getattr(found, name)[n].numpy() == pytest.approx(value, abs=1e-5), name
        assert found.names[n] == NAMES[p_K.argmax()]
        np.testing.assert_allclose(found.member_probabilities[:, n], p_MK, atol=1e-5)


def test_every_kind_of_input_is_the_same_images(ensemble, pixels, tmp_path):
    expected = ensemble.predict(pixels)
    for n, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{n}.png")
    files, photos, tensor = sorted(tmp_path.iterdir()), [Image.fromarray(x) for x in pixels], torch.from_numpy(pixels)
    floats = tensor.permute(0, 3, 1, 2) / 255
    given = [photos, list(pixels), files, [str(file) for file in files], tmp_path, str(tmp_path), tensor, floats]
    given += [tensor.permute(0, 3, 1, 2), floats.numpy(), pixels / 255, [photos[0], files[1], *floats[2:]]]
    for images in given:
        assert_same(ensemble.predict(images), expected)
        assert_same(ensemble.predict(images, batch_size=3), expected)
    assert_same(ensemble.predict(iter(photos)), expected)
    for one in (pixels[0], floats[0], photos[0], files[0], str(files[0])):
        assert_same(ensemble.predict(one), ensemble.predict(pixels[:1]))


def test_other_sizes_are_scaled_as_files_are(ensemble, tmp_path):
    image = np.random.default_rng(1).integers(256, size=(50, 70, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "wide.png")
    expected = ensemble.predict(decode_file(tmp_path / "wide.png", SIZE))
    for given in (tmp_path / "wide.png", Image.fromarray(image), image, torch.from_numpy(image).permute(2, 0, 1) / 255):
        assert_same(ensemble.predict(given), expected)
    black = Image.new("L", (9, 9))
    assert len(ensemble.predict([black, black])) == 2, "a black photo is a photo"


def test_what_cannot_be_read_in_a_folder_is_left_out_and_named(ensemble, pixels, tmp_path, capsys):
    for n, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{n}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    expected = ensemble.predict([image for n, image in enumerate(pixels) if n != 2])
    for batch_size in (1, 3, 256):
        found = ensemble.predict(tmp_path, batch_size)
        assert_same(found, expected)
        assert found.paths == [str(tmp_path / f"{n}.png") for n in range(7) if n != 2]
        assert found.left_out == {str(tmp_path / "2.png"): "cannot identify image file"}
        assert [row["path"] for row in found.rows()] == found.paths
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"dicedist: warning: left out {tmp_path / '2.png'}: cannot identify image file" and len(told) == 3
    assert expected.paths is None and not expected.left_out and "path" not in expected.rows()[0]
    assert ensemble.predict([tmp_path / "1.png"]).paths == [str(tmp_path / "1.png")]
    with pytest.raises(ValueError, match="2.png: cannot identify image file"):
        ensemble.predict(sorted(tmp_path.iterdir()))
    for n in range(7):
        (tmp_path / f"{n}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="no image could be read: .*0.png: cannot identify image file"):
        ensemble.predict(tmp_path)


def test_rows_are_ready_for_a_table(ensemble, pixels):
    rows = ensemble.predict(pixels).rows()
    assert [row["label"] for row in rows] == ensemble.predict(pixels).names
    assert rows[0].keys() == {
        "label", "confidence", "disagreement", "entropy", "mutual_information", "ood_score", "members", "probabilities"
    }  # fmt: skip
    assert sum(rows[0]["probabilities"].values()) == pytest.approx(1)


def test_calibrated_probabilities(members, pixels):
    cold = Ensemble.from_members(members, NAMES, SIZE, MEAN, STD, average="logits", temperature=2.5).predict(pixels)
    torch.testing.assert_close(cold.calibrated.amax(1), cold.confidence)
    expected = (cold.member_logits.mean(0) / 2.5).softmax(1)
    torch.testing.assert_close(cold.calibrated, expected)
    found = metrics.entropies(cold.member_logits)["mutual_information"]
    torch.testing.assert_close(cold.mutual_information.double(), found, atol=1e-6, rtol=1e-4)
    assert cold.abstain is None and cold.sets is None, "networks of one's own were calibrated on nothing"


def test_copies_of_the_members_are_kept(members, ensemble, pixels):
    before = ensemble.predict(pixels)
    with torch.no_grad():
        members[0][0].weight += 1
    assert members[0][0].weight.requires_grad
    assert_same(ensemble.predict(pixels), before)
    with torch.no_grad():
        members[0][0].weight -= 1


def test_some_members(run):
    images = np.random.default_rng(2).integers(256, size=(5, 32, 32, 3), dtype=np.uint8)
    whole = Ensemble.load(run, trusted=True)
    assert len(whole) == 3 and [len(features) for features in whole.features(images)] == [5, 5, 5]
    for places in ([0, 2], [1], [0, 1, 2]):
        loaded, chosen = Ensemble.load(run, members=places, trusted=True), whole[places]
        assert chosen.about == loaded.about and (chosen.w is None) == (loaded.w is None)
        assert_same(chosen.predict(images), loaded.predict(images))
    assert_same(whole[1:].predict(images), whole[[1, 2]].predict(images))
    assert_same(whole[-1].predict(images), whole[2].predict(images))
    assert [member.about.members for member in whole] == [[0], [1], [2]]
    logits = [head(features) for head, features in zip(whole.classifiers, whole.features(images), strict=True)]
    torch.testing.assert_close(torch.stack(logits), whole.predict(images).member_logits)
    assert Ensemble.load(str(run), average="probabilities", trusted=True).about.average == "probabilities"
    exact = Ensemble.load(run, images="float", trusted=True)
    torch.testing.assert_close(exact.predict(images).probabilities, whole.predict(images).probabilities)


def test_exported_files_answer_as_the_run(run, tmp_path):
    images = torch.randint(256, (3, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = Ensemble.load(run, trusted=True)
    for format in ("safetensors", "pt2"):
        formats.export(whole, tmp_path / f"model.{format}", format, images)
        again = Ensemble.load(tmp_path / f"model.{format}", trusted=True).to("cpu")
        assert again.about == whole.about
        assert_same(again.predict(images, batch_size=2), whole.predict(images))
    assert_same(
        Ensemble.load(tmp_path / "model.safetensors", [2], trusted=True).predict(images), whole[2].predict(images)
    )
    for use in (again.features, lambda images: again[0]):
        with pytest.raises(ValueError, match="model.pt2 .*: load the run, or export it as safetensors"):
            use(images)
    for format in ("safetensors", "pt2"):
        (tmp_path / f"junk.{format}").write_bytes(b"junk")
    for source, line, settings in (
        ("model.safetensors", r"members=\[7\]: the file holds the members \[0, 1, 2\]", {"members": [7]}),
        ("model.safetensors", "exported with its own average and images", {"average": "probabilities"}),
        ("junk.pt2", "junk.pt2 is not an ensemble that dicedist.export wrote", {}),
        ("junk.safetensors", "junk.safetensors is not an ensemble that dicedist.export wrote", {}),
        ("lost.pt2", "lost.pt2: there is no such file", {}),
        ("model.onnx", "needs onnxruntime: load the run", {}),
        ("nothing", "nothing is not a run: it has no config.yaml", {}),
    ):
        with pytest.raises(ValueError, match=line):
            Ensemble.load(tmp_path / source, trusted=True, **settings)


def test_exports_of_another_version(run, tmp_path, monkeypatch):
    whole, images = Ensemble.load(run, trusted=True), torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    newer = whole.about.as_json()[:-1] + ', "sharpness": 1}'
    monkeypatch.setattr(type(whole.about), "as_json", lambda self: newer)
    formats.write_safetensors(whole, tmp_path / "newer.safetensors", images)
    with pytest.raises(ValueError, match=r"another version of dicedist \(they differ in sharpness\): export the run"):
        Ensemble.load(tmp_path / "newer.safetensors")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x: x.astype(np.int64), "images are torch.int64: give uint8 in 0..255 or floats in 0..1"),
        (lambda x: x.astype(np.float32), r"pixels lie in 0..255: give floats in 0..1"),
        (lambda x: x / np.float32("nan"), r"pixels lie in nan..nan"),
        (lambda x: (x > 9).astype(np.uint8), "the brightest pixel is 1 of 255: were images in 0..1"),
        (lambda x: x[..., 0], r"images have shape \[7, 16, 16\]: give \[N, H, W, 3\] or \[N, 3, H, W\]"),
        (lambda x: x[:0], r"images have shape \[0, 16, 16, 3\]"),
        (lambda x: [], "there is no image in the list"),
        (lambda x: 3, "images are a int: give PIL images, arrays, tensors or paths"),
        (lambda x: [None], "an item of the list is a NoneType"),
        (lambda x: [x], r"an item of the list has shape \[7, 16, 16, 3\]: give one image each"),
        (lambda x: "lost.png", "lost.png: there is no such file"),
        (lambda x: [__file__], "test_library.py: cannot identify image file"),
    ],
)
def test_what_cannot_be_predicted(ensemble, pixels, change, line):
    with pytest.raises(ValueError, match=line):
        ensemble.predict(change(pixels))


class Wraps(nn.Module):
    """Changes the logits of a network."""

    def __init__(self, network, change):
        super().__init__()
        self.network, self.change = network, change

    def forward(self, images):
        logits = self.network(images)
        return {"logits": logits} if self.change is dict else self.change(logits, images)


def as_nan(logits, images):
    return logits * float("nan")


def lost(logits, images):
    raise KeyError("mask")


def dark(logits, images):
    return logits.where((images == 0).all(), float("nan"))


def test_networks_without_weights_and_means_of_any_type(pixels, tmp_path):
    class Brightness(nn.Module):
        def forward(self, images):
            return images.mean((2, 3))

    ensemble = Ensemble.from_members([Brightness()], 3, SIZE, torch.tensor([0.5] * 3), np.array([0.25] * 3))
    assert Ensemble.load(ensemble.export(tmp_path / "model.pt2")).predict(pixels).labels.shape == (7,)


def test_what_is_no_ensemble(members, ensemble, pixels):
    for build, line in (
        (lambda: Ensemble.from_members([], NAMES, SIZE), "there is no member in the list"),
        (
            lambda: Ensemble.from_members(members, 4, SIZE),
            r"member 0 makes \[2, 3\] of 2 images, where \[2, 4\]",
        ),
        (lambda: Ensemble.from_members(members, 3, SIZE, average="votes"), "average=votes: write logits or prob"),
        (lambda: Ensemble.from_members([3], 3, SIZE), "member 0 is a int: give torch modules"),
        (lambda: Ensemble.from_members(members, 3, 9), r"member 0 cannot read images \[2, 3, 9, 9\]: "),
        (lambda: Ensemble.from_members(members, 3, SIZE, mean=(0.5,)), r"mean=\(0.5,\) and std=.*: give one number"),
        (lambda: Ensemble.from_members(members, 3, SIZE, std=(0, 1, 1)), "a std above 0"),
        (lambda: Ensemble.from_members(members, 3, SIZE, temperature=0), "temperature=0: write a number above 0"),
        (lambda: Ensemble.from_members(members, 3, (SIZE, SIZE)), r"size=\(16, 16\): write the side of the images"),
        (lambda: Ensemble.from_members(members, 1, SIZE), "class_names=1: give the names of at least two classes"),
        (lambda: Ensemble.from_members(members, "abc", SIZE), "class_names='abc': give the names of at least two"),
        (lambda: Ensemble.from_members(members, 3, SIZE, mean=0.5), "mean or std is 0.5: give one number for each"),
        (lambda: Ensemble.from_members([Wraps(members[0], dict)], 3, SIZE), "member 0 makes dict of 2 images"),
        (lambda: Ensemble.from_members([Wraps(members[0], as_nan)], 3, SIZE), "member 0 makes NaN or infinite logits"),
        (lambda: Ensemble.from_members([Wraps(members[0], lost)], 3, SIZE), "member 0 cannot read .* KeyError: 'mask'"),
        (lambda: Ensemble.from_members([Wraps(members[0], dark)], 3, SIZE).predict(pixels), "place 0 gave NaN logits"),
        (lambda: ensemble.predict(np.array([None])), "images are an array of object: give uint8"),
        (lambda: ensemble[[0, 0]], "the ensemble has places 0 to 2, name some once each"),
        (lambda: ensemble.features(pixels), "networks trained elsewhere return logits only"),
        (lambda: ensemble.predict(pixels, batch_size=0), "batch_size=0: write a whole number from 1"),
    ):
        with pytest.raises(ValueError, match=line):
            build()
    with pytest.raises(IndexError):
        ensemble[3]


def test_importing_it_is_quick_and_brings_no_torch():
    code = "import sys, time; start = time.perf_counter(); import dicedist; print(time.perf_counter() - start)"
    told = subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], capture_output=True)
    assert told.returncode == 0 and float(told.stdout) < 0.3


def test_public_names():
    assert set(dicedist.__all__) <= set(dir(dicedist))
    assert all(getattr(dicedist, name).__doc__ for name in dicedist.__all__)
    assert dicedist.metrics is metrics
    with pytest.raises(AttributeError, match="has no attribute 'Ensembel'"):
        dicedist.Ensembel  # noqa: B018
