"""Images decoded on the fly, from files and shards: both pipelines see the same crops, and what is wrong is named."""

import dataclasses
import io
import logging
import re
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist.data import __main__ as command
from dicedist.data.augmentation import boxes
from dicedist.data.encoded import Files, examined
from dicedist.data.pipeline import Loader
from dicedist.data.sources import load
from tests.support.photographs import CLASSES, photograph

CPU = torch.device("cpu")
BACKENDS = ["torch", "dali"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of many sizes and formats, one turned by its EXIF tag; 36 for training, 12 for the test."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for split, each in (("train", 12), ("test", 4)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for place in range(each):
                kinds = {3: ("png", {}), 5: ("gif", {}), 7: ("jpg", {"exif": turned})}
                how = kinds.get(place, ("jpg", {"quality": 92}))
                width, height = rng.integers(30, 120, 2).tolist()
                photograph(rng, root / split / name / f"{place:02}.{how[0]}", width, height, **how[1])
    return root


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("shards") / "packed"
    command.run(["pack", str(folder), str(output), "images=10"])
    return output


@pytest.fixture
def config(folder, shards, data_config, fresh_home):
    def make(kind, **changes):
        root = folder if kind == "files" else shards
        return data_config(kind, **{"root": str(root), "split": "full", "size": 32, **changes})

    return make


def batches(source, config, start=0, **more):
    loader = Loader(source.train, config, source, 8, 0, CPU, **{"members": [0], **more})
    return list(loader.epoch(1, start))


def test_boxes_lie_inside_and_are_the_share_that_was_drawn():
    sizes = torch.tensor([[200.0, 100], [50, 80], [1, 1]], dtype=torch.float64)
    assert boxes(sizes, None).tolist() == [[50, 0, 100, 100], [0, 15, 50, 50], [0, 0, 1, 1]]
    every = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0)).double()
    every[:, 1] = np.log(4 / 3) * (2 * every[:, 1] - 1)
    left, top, width, height = boxes(sizes[:1].expand(2000, 2), every).unbind(1)
    assert (left >= 0).all() and (top >= 0).all() and (left + width <= 200).all() and (top + height <= 100).all()
    inside = (width < 200) & (height < 100) & (width > 20) & (height > 20)
    assert np.allclose((width * height / 20_000)[inside], every[inside, 0], rtol=0.06)
    assert left.min() == 0 and (left + width).max() == 200


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_views_are_the_drawn_crops(config, kind):
    settings = config(kind, pipeline="torch", augment="cutout", cutout_size=8)
    source = load(settings)
    assert source.class_names == list(CLASSES) and (len(source.train), len(source.test)) == (36, 12)
    loader = Loader(source.train, settings, source, 8, 0, CPU, [0])
    batch, raw = next(loader.epoch(1)), next(loader.raw_batches(loader.planned(1), 1))
    images, rows, drawn = raw
    assert rows.equal(source.train.rows_of(batch.indices_B)) and drawn.crops_B4 is not None
    for view, row, box, flip, (y, x) in zip(
        batch.images[0], rows.tolist(), raw.boxes_B4.tolist(), drawn.flips_B, drawn.cutout_B2,
        strict=True,
    ):  # fmt: skip
        left, top, width, height = box
        whole = Image.open(io.BytesIO(images.read(row)))
        upright = Image.fromarray(np.asarray(whole.convert("RGB")))
        if whole.getexif().get(0x0112) == 6:
            upright = upright.transpose(Image.Transpose.ROTATE_270)
        assert upright.size == tuple(images.sizes_R2[row])
        cropped = upright.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(cropped)).permute(2, 0, 1) / 255
        expected = (expected.flip(2) if flip else expected) - torch.tensor(source.mean).view(3, 1, 1)
        expected /= torch.tensor(source.std).view(3, 1, 1)
        expected[:, max(y - 4, 0) : y + 4, max(x - 4, 0) : x + 4] = 0
        assert torch.allclose(view, expected, atol=0.02)


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_dali_decodes_the_same_crops(config, kind):
    pytest.importorskip("nvidia.dali")
    settings = config(kind, pipeline="dali", augment="cutout", num_threads=2)
    source = load(settings)
    ours, dalis = (batches(source, dataclasses.replace(settings, pipeline=name)) for name in BACKENDS)
    levels = 255 * torch.tensor(source.std).view(3, 1, 1)
    for one, other in zip(ours, dalis, strict=True):
        difference = (one.images[0] - other.images[0]).abs() * levels
        assert one.checksum == other.checksum and difference.mean() < 0.5 and difference.max() < 20
    again = batches(source, settings, start=3)
    assert all(a.images[0].equal(b.images[0]) for a, b in zip(dalis[3:], again, strict=True))


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_every_start_rank_and_replica_sees_the_same(config, kind):
    settings = config(kind, pipeline="torch", num_threads=2)
    source = load(settings)
    whole = batches(source, settings)
    for one, other in zip(whole[3:], batches(source, settings, start=3), strict=True):
        assert one.checksum == other.checksum and one.images[0].equal(other.images[0])
    half = batches(source, settings, replica=1, replicas=2)
    assert half[0].images[0].equal(whole[0].images[0][4:])
    own = batches(source, dataclasses.replace(settings, per_member=True), members=[0, 1])
    assert len(own[0].images) == 2 and not own[0].images[0].equal(own[0].images[1])
    labels = load(settings, labels_only=True)
    assert labels.train.inputs_R is None and labels.train.labels_N.equal(source.train.labels_N)


def test_shards_hold_what_the_folder_holds(config):
    files, shards = load(config("files")), load(config("shards"))
    seen = [sorted(source.test.images_NHWC.flatten(1).sum(1).tolist()) for source in (files, shards)]
    assert seen[0] == seen[1] and files.test.labels_N.bincount().equal(shards.test.labels_N.bincount())


def test_packing_goes_on_where_it_was_interrupted(folder, tmp_path, monkeypatch, capsys):
    from dicedist.data import pack

    written, real = [], pack.write_shard

    def failing(root, path, found):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        real(root, path, found)

    monkeypatch.setattr(pack, "write_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        command.run(["pack", str(folder), str(tmp_path / "out"), "images=10"])
    monkeypatch.setattr(pack, "write_shard", real)
    command.run(["pack", str(folder), str(tmp_path / "out"), "images=10"])
    command.run(["pack", str(folder), str(tmp_path / "whole"), "images=10"])
    assert "wrote 4 shards" in capsys.readouterr().out
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="shards of other images or of another size"):
        command.run(["pack", str(folder), str(tmp_path / "out"), "images=20"])
    with pytest.raises(ValueError, match="write python -m dicedist.data pack FOLDER OUTPUT"):
        command.run(["unpack", str(folder)])


def copied(root, target):
    target.mkdir()
    for path in root.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_replaced_image_is_another_run(folder, shards, config, tmp_path):
    root = copied(shards, tmp_path / "mine")
    before = load(config("shards", root=str(root))).data_digest
    assert load(config("shards", root=str(root))).data_digest == before
    shard = root / "train-000001.tar"
    data = bytearray(shard.read_bytes())
    data[512 + 600] ^= 1  # in the pixels of its first image, as long as before
    shard.write_bytes(data)
    assert load(config("shards", root=str(root))).data_digest != before


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:3000]),
            "train-000000.tar (ends in the middle of|is no whole tar)",
        ),
        (lambda path: path.write_bytes(path.read_bytes().rstrip(bytes(1))), "cut short|is no whole tar|ends in"),
        (lambda path: rewritten(path, lambda member: setattr(member, "name", "../" + member.name)), "is no plain file"),
        (lambda path: rewritten(path, drop_label), "has no label: write"),
        (lambda path: rewritten(path, None, b"cat"), "is 'cat', write a whole number from 0"),
        (lambda path: rewritten(path, None, b"7"), "names 3 classes, and the shards have the label 7"),
        (lambda path: rewritten(path, as_json, b"[" * 9999), "the label of .* write a whole number from 0 in .cls"),
        (lambda path: unnamed(path, b"2000000000"), "one of them is 2000000000: number the classes from 0, or write"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(2000)), "is no whole tar"),
    ],
)
def test_shards_that_cannot_be_used(shards, config, tmp_path, damage, line):
    root = copied(shards, tmp_path / "mine")
    damage(root / "train-000000.tar")
    with pytest.raises(ValueError, match=line) as error:
        load(config("shards", root=str(root)))
    assert "\n" not in str(error.value)


def drop_label(member):
    member.name = member.name.replace(".cls", ".txt")


def as_json(member):
    member.name = member.name.replace(".cls", ".json")


def unnamed(path, label):
    rewritten(path, None, label)
    (path.parent / "classes.txt").unlink()


def rewritten(path, change, label=None):
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            if change:
                change(member)
            if label and member.name.endswith((".cls", ".json")):
                data, member.size = label, len(label)
            tar.addfile(member, io.BytesIO(data))


def test_damaged_files_are_named_or_counted(folder, config, tmp_path, caplog):
    root, rng = tmp_path / "mine", np.random.default_rng(1)
    for split in ("train", "test"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for place in range(3):
                photograph(rng, root / split / name / f"{place}.jpg", 60, 40)
    cut = root / "train" / "elm" / "1.jpg"
    cut.write_bytes(cut.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"1 image cannot be decoded \(train/elm/1.jpg: .*truncated"):
        load(config("files", root=str(root), on_corrupt="refuse"))
    caplog.set_level(logging.WARNING)
    source = load(config("files", root=str(root), on_corrupt="skip"))
    assert source.train.labels_N.bincount().tolist() == [3, 2, 3] and "left out train/elm/1.jpg" in caplog.text
    spoiled = root / "train" / "ash" / "spoiled.png"
    photograph(rng, spoiled, 60, 40)
    whole = spoiled.read_bytes()
    spoiled.write_bytes(whole[: len(whole) // 2] + bytes(60) + whole[len(whole) // 2 + 60 :])
    source = load(config("files", root=str(root), on_corrupt="skip"))  # head and end are as they should be
    assert source.train.labels_N.bincount().tolist() == [3, 2, 3] and "left out train/ash/spoiled.png" in caplog.text
    last = root / "train" / "oak" / "2.jpg"
    last.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"oak/2.jpg had [\d,]+ bytes at the start, and now has 5"):
        batches(source, config("files", root=str(root), pipeline="torch"))
    assert examined(Files(str, lambda row: b"no image"), 0) == "cannot identify image file"


def test_a_list_names_paths_labels_and_splits(folder, config, tmp_path):
    def refused(line, rows, header="path,label,split"):
        (folder / "list.csv").write_text("\n".join([header, *rows]) + "\n")
        with pytest.raises(ValueError, match=re.escape(line)):
            load(config("files", root=str(folder / "list.csv")))

    rows = [f"train/{name}/{place:02}.jpg,{name},train" for name in CLASSES for place in (0, 1)]
    rows += [f"test/{name}/00.jpg,{name},test" for name in CLASSES]
    refused("has no column split", [row.rpartition(",")[0] for row in rows], "path,label")
    refused("names no.jpg, which is not in", [*rows, "no.jpg,ash,train"])
    refused("split is 'dev', write train or test", [*rows, "train/ash/02.jpg,ash,dev"])
    unlabeled = ["train/ash/02.jpg,,train", "train/ash/03.jpg,NaN,train"]
    refused("list.csv: no label in 2 rows (9, 10): fill or remove them", [*rows, *unlabeled])
    refused("test has images of 3 of 4 classes", [*rows, "train/ash/02.jpg,fir,train"])
    (folder / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    source = load(config("files", root=str(folder / "list.csv")))
    assert (len(source.train), len(source.test), source.class_names) == (6, 3, list(CLASSES))
    first, *others = rows  # another label, then another split, of the same images
    for changed in ([first.replace(",ash,", ",elm,"), *others], [first.replace(",train", ",test"), *others]):
        (folder / "list.csv").write_text("\n".join(["path,label,split", *changed]) + "\n")
        again = load(config("files", root=str(folder / "list.csv")))
        assert again.data_digest != source.data_digest
        assert (len(again.train), again.train.labels_N[0].item()) in ((6, 1), (5, 0))
    (folder / "list.csv").unlink()
    (tmp_path / "absolute.csv").write_text("\n".join(["path,label,split", *(f"{folder}/{row}" for row in rows)]))
    elsewhere = load(config("files", root=str(tmp_path / "absolute.csv")))
    assert elsewhere.train.take(torch.arange(6)).equal(source.train.take(torch.arange(6)))
    with pytest.raises(ValueError, match="holds no train-\\*.tar: python -m dicedist.data pack"):
        load(config("shards", root=str(tmp_path)))
