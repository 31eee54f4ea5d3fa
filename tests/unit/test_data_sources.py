"""Sources: only the published files, split fairly, with one copy per node that is never incomplete."""

import contextlib
import dataclasses
import errno
import hashlib
import http.server
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from dicedist.config import compose_config
from dicedist.data import prepared
from dicedist.data.sets import cifar, shapes
from dicedist.data.sources import holdout, load, whole_split


@pytest.mark.parametrize(("name", "num_classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_what_torchvision_reads(real_data, data_config, name, num_classes):
    source = load(data_config(name, split="full"))
    for split, train in ((source.train, True), (source.test, False)):
        dataset = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name](real_data, train=train)
        assert split.images_NHWC.equal(torch.from_numpy(dataset.data))
        assert split.labels_N.tolist() == dataset.targets
    assert source.num_classes == num_classes and source.class_names == dataset.classes
    assert len(source.val) == 0
    levels = torch.arange(256).double() / 255
    for color in range(3):
        share = source.train.images_NHWC[..., color].flatten().bincount(minlength=256) / (50_000 * 32 * 32)
        mean = (share * levels).sum()
        std = (share * (levels - mean) ** 2).sum().sqrt()
        assert (mean.item(), std.item()) == pytest.approx((source.mean[color], source.std[color]), abs=6e-5)


def test_shapes_need_no_files(data_config, fresh_home):
    source = load(data_config("shapes"))
    for split, name in ((source.test, "test"), (load(data_config("shapes", split="full")).train, "train")):
        images, labels = shapes.generate(name)
        assert np.array_equal(split.images_NHWC, images) and np.array_equal(split.labels_N, labels)
    assert (source.num_classes, source.mean, source.std) == (10, shapes.MEAN, shapes.STD)


def test_split_is_stratified_and_fixed(real_data, data_config):
    source = load(data_config("cifar100"))
    assert source.val.labels_N.bincount().tolist() == [25] * 100
    assert source.train.labels_N.bincount().tolist() == [475] * 100
    rows = torch.cat([source.train.rows_N, source.val.rows_N])
    assert rows.sort().values.equal(torch.arange(50_000))
    again = load(data_config("cifar100"), labels_only=True)
    assert again.val.rows_N.equal(source.val.rows_N) and again.data_digest == source.data_digest
    assert again.train.inputs_R is None and again.test.inputs_R is None
    other = load(data_config("cifar100", split_seed=1), labels_only=True)
    assert not other.val.rows_N.equal(source.val.rows_N) and other.data_digest != source.data_digest
    some = source.val.take(torch.tensor([7, 3]))
    assert some.equal(source.val.images_NHWC[[7, 3]])


def test_limit_takes_every_class_alike(data_config):
    config = data_config("cifar100", split="full", train_limit=250)
    labels = torch.randint(100, (5000,), generator=torch.Generator().manual_seed(0))
    rows, _ = holdout(labels, config)
    counts = labels[rows].bincount(minlength=100)
    assert counts.sum() == 250 and counts.min() == 2 and counts.max() == 3
    assert len(holdout(labels, dataclasses.replace(config, train_limit=10**6))[0]) == 5000


@pytest.mark.parametrize(
    ("changes", "val", "test"),
    [
        ({}, 2500, 10_000),
        ({"train_limit": 19_000}, 1000, 10_000),  # two fifths of the training images, as of the held-out ones
        ({"train_limit": 100}, 500, 10_000),  # thresholds and label sets need some
        ({"train_limit": 10**6}, 2500, 10_000),
        ({"train_limit": 500, "val_limit": None}, 2500, 10_000),
        ({"val_limit": 50, "test_limit": 1000}, 50, 1000),
        ({"split": "full", "train_limit": 500}, 0, 10_000),
    ],
)
def test_limits(real_data, data_config, changes, val, test):
    source = load(data_config("cifar10", **changes), labels_only=True)
    assert (len(source.val), len(source.test)) == (val, test)
    for split in (source.val, source.test):
        counts_K = split.labels_N.bincount(minlength=10)
        assert counts_K.max() - counts_K.min() <= 1


def test_limits_change_the_digest_only_where_they_leave_something_out(real_data, data_config):
    whole, *same = (
        load(data_config("cifar10", **changes), labels_only=True).data_digest
        for changes in ({"val_limit": None}, {"val_limit": "auto"}, {"val_limit": 10**5, "test_limit": 10**5})
    )
    assert same == [whole] * 2
    cut = [{"val_limit": 50}, {"test_limit": 50}, {"train_limit": 500}, {"train_limit": 500, "val_limit": None}]
    digests = {load(data_config("cifar10", **changes), labels_only=True).data_digest for changes in cut}
    assert len(digests | {whole}) == 5


def test_holdout_leaves_every_class_in_training(data_config):
    labels = torch.tensor([0, 1, 1, 1, 1, 1, 2, 2])
    train, val = holdout(labels, data_config("folder", val_fraction=0.9))
    assert labels[train].bincount().tolist() == [1, 1, 1] and len(val) == 5
    with pytest.raises(ValueError, match="holds out none: write a larger one, or data.split=full"):
        holdout(labels, data_config("folder", val_fraction=0.05))


@pytest.mark.parametrize(
    ("num_inputs", "held_out"),
    [(140, 50), (100, 50), (99, 20), (20, 5), (400, 80), (5_000, 1_000), (20_000, 2_000), (50_000, 2_500)],
)
def test_auto_holds_out_enough_for_what_is_promised(data_config, num_inputs, held_out):
    """The README's 140 photos held out 6. Stratified, rounded up to whole inputs of a class."""
    labels = torch.arange(num_inputs) % 5
    train, val = holdout(labels, data_config("folder"))
    assert len(train) + len(val) == num_inputs and held_out <= len(val) <= held_out + 5
    counts = labels[val].bincount(minlength=5)
    assert counts.max() - counts.min() <= 1
    assert len(val) <= (num_inputs + 5) / 2


def test_auto_is_stratified_and_leaves_every_class_in_both(data_config):
    labels = torch.tensor([0] * 100 + [1] * 38 + [2] * 2)
    train, val = holdout(labels, data_config("folder"))
    assert labels[val].bincount().tolist() == [36, 14, 1] and labels[train].bincount().min() == 1


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("cifar10", 0.05), ("cifar100", 0.05), ("shapes", 0.05), ("digits", 0.1), ("wine", 0.1), ("breast_cancer", 0.1)]
    + [(name, "auto") for name in ("folder", "files", "shards", "own", "vectors")],
)
def test_the_share_by_default(name, fraction):
    """Published sets keep the share that committed results were made with; a user's own data gets enough."""
    words = ["data.root=x"] if name in ("folder", "files", "shards", "vectors") else []
    words += ["data._target_=my.Own", "data.trusted=true"] if name == "own" else []
    assert compose_config([f"data={name}", *words]).data.val_fraction == fraction


def test_no_more_is_held_out_than_rank_0_can_gather(data_config, monkeypatch):
    monkeypatch.setattr("dicedist.data.sources.MOST_HELD_OUT", 60)
    labels = torch.arange(4000) % 4
    labels[:400] = 0
    train, val = holdout(labels, data_config("folder", val_fraction=0.05))
    assert len(train) + len(val) == 4000 and 56 <= len(val) <= 60
    assert labels[val].bincount().tolist() == (labels.bincount() * 60 // 4000).tolist()


def test_labels_outside_the_classes():
    about = {"class_names": ["a", "b"]}
    labels = np.array([0, 1, 2])
    bad = prepared.Prepared(about, None, {"train_labels": labels, "train_images": np.zeros((3, 8, 8, 3), np.uint8)})
    with pytest.raises(ValueError, match="train: labels from 0 to 2, of 2 classes"):
        whole_split(bad, "train", None)


# A CIFAR-100 of 20 images, whose md5 sums stand in for the published ones.


@pytest.fixture
def little(tmp_path, monkeypatch, fresh_home):
    """The folder that holds this CIFAR-100, elsewhere than home."""
    root = tmp_path / "little"
    folder = root / CIFAR100.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def entry(n):
        return {"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), "fine_labels": [i % 5 for i in range(n)]}

    contents = {"train": entry(20), "test": entry(10), "meta": {"fine_label_names": list("abcde")}}
    for file, content in contents.items():
        (folder / file).write_bytes(pickle.dumps(content))
    md5 = {file: hashlib.md5((folder / file).read_bytes()).hexdigest() for file in contents}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": md5["meta"]})
    return root


@pytest.fixture
def archive(little, tmp_path, monkeypatch):
    """The archive that a download gets."""
    path = tmp_path / CIFAR100.filename
    with tarfile.open(path, "w:gz") as tar:
        tar.add(little / CIFAR100.base_folder, CIFAR100.base_folder)
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=tmp_path)) as server:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(CIFAR100, "url", f"http://127.0.0.1:{server.server_port}/{path.name}")
        server.handle_error = lambda *_: None  # a client that hangs up is part of the test
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path
        server.shutdown()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def config(data_config, little):
    return data_config("cifar100", root=str(little), split="full")


def folders(home):
    return sorted(path.name for path in (home / "prepared").glob("*/*/"))


@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_damaged_file_is_named_before_it_is_unpickled(little, config, monkeypatch, file):
    path = little / CIFAR100.base_folder / file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: damaged, its md5 is not [0-9a-f]+; delete it"):
        load(config)


def test_file_damaged_after_it_was_prepared(little, config):
    assert len(load(config).train) == 20
    (little / CIFAR100.base_folder / "train").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="train: damaged"):
        load(config)


def test_missing_without_download(config, tmp_path):
    config = dataclasses.replace(config, root=str(tmp_path / "nowhere"))
    advice = "put the folder cifar-100-python into .*nowhere, or write data=shapes, which needs no files$"
    with pytest.raises(ValueError, match=f"cifar100 is not in .*nowhere: write data.download=true, or {advice}"):
        load(config)


def test_download(archive, config, tmp_path):
    config = dataclasses.replace(config, root=str(tmp_path / "new"), download=True)
    assert len(load(config).train) == 20
    assert sorted(os.listdir(tmp_path / "new")) == [".cifar100.lock", CIFAR100.base_folder]


@pytest.mark.parametrize("fault", ["partial", "no network", "disk full", "no permission"])
def test_download_that_fails_leaves_nothing(archive, config, tmp_path, monkeypatch, fault):
    if fault == "partial":
        archive.write_bytes(archive.read_bytes()[:-100])
    elif fault == "no network":
        monkeypatch.setattr(CIFAR100, "url", "http://127.0.0.1:9/discard")
    elif fault == "disk full":
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", lambda *_: throw(full))
    else:
        monkeypatch.setattr(cifar.tempfile, "TemporaryDirectory", lambda **_: throw(PermissionError(13, "Denied")))
    config = dataclasses.replace(config, root=str(tmp_path / "new"), download=True)
    with pytest.raises(
        ValueError, match=r"^cifar100 could not be downloaded \(.+\): put the folder .+ needs no files$"
    ):
        load(config)
    assert os.listdir(tmp_path / "new") == [".cifar100.lock"]


def throw(error):
    raise error


def test_unwritable_home_means_private_memory(config, fresh_home, monkeypatch, caplog):
    fresh_home.write_text("a file where a folder should be")
    source = load(config)
    assert len(source.train) == 20 and source.train.images_NHWC.shape == (20, 32, 32, 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "every process holds its own copy of the images" in caplog.text


def test_full_disk_means_private_memory(config, fresh_home, monkeypatch, caplog):
    whole = load(dataclasses.replace(config))
    shutil.rmtree(fresh_home)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: throw(OSError(errno.ENOSPC, "No space left on device")))
    source = load(config)
    assert source.train.images_NHWC.equal(whole.train.images_NHWC) and source.data_digest == whole.data_digest
    assert "No space left on device" in caplog.text
    assert folders(fresh_home) == []


def test_killed_while_preparing(config, fresh_home):
    child = multiprocessing.get_context("fork").Process(target=load_and_die, args=(config,))
    child.start()
    child.join()
    assert folders(fresh_home) == ["partial"]
    assert load(config).train.images_NHWC.shape == (20, 32, 32, 3)
    (whole,) = folders(fresh_home)
    assert whole != "partial"


def load_and_die(config):
    prepared.json.dumps = lambda _: os._exit(1)  # dies when all but about.json is written
    load(config)


def test_a_write_never_reaches_the_file(config):
    source = load(config)
    source.train.inputs_R.zero_()
    assert load(config).train.images_NHWC.any()


def together(number, target, *args):
    """Starts `number` processes at once, each with a queue and a barrier; returns what they put into the queue."""
    fork = multiprocessing.get_context("fork")
    queue, barrier = fork.Queue(), fork.Barrier(number)
    children = [fork.Process(target=target, args=(*args, queue, barrier), daemon=True) for _ in range(number)]
    for child in children:
        child.start()
    answers = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    return answers


def prepare_at_once(config, queue, barrier):
    build, builds = prepared._built, []
    prepared._built = lambda *args: builds.append(1) or build(*args)
    barrier.wait()
    digest = load(config).data_digest
    queue.put((len(builds), digest))


def test_one_of_many_processes_prepares(config):
    answers = together(4, prepare_at_once, config)
    assert sorted(builds for builds, _ in answers) == [0, 0, 0, 1]
    assert len({digest for _, digest in answers}) == 1


def share_of_images(config, queue, barrier):
    """KiB of the mapped training images in this process's memory (RSS), and its proportional share of them (PSS)."""
    source = load(config)
    source.train.inputs_R.view(-1)[::1024].sum()  # touches every page
    barrier.wait()
    rss = pss = counting = 0
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-", line):
            counting = line.rstrip().endswith("train_images.npy")
        elif line.startswith(("Rss:", "Pss:")):
            rss += counting * line.startswith("Rss:") * int(line.split()[1])
            pss += counting * line.startswith("Pss:") * int(line.split()[1])
    queue.put((rss, pss))
    barrier.wait()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="proportional set size is Linux's")
def test_processes_share_one_copy(real_data, data_config):
    config = data_config("cifar100")
    load(config)
    whole = 50_000 * 3072 / 1024
    for rss, pss in together(5, share_of_images, config):
        assert rss >= whole and pss <= 1.05 * whole / 5  # less if another test of this process has it mapped


def test_waiting_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "lock"
    with contextlib.ExitStack() as held:
        held.enter_context(prepared.one_process(path, "test"))
        child = multiprocessing.get_context("fork").Process(target=wait_for, args=(path, tmp_path / "said"))
        child.start()
        child.join(0.5)
        assert child.is_alive()
    child.join()
    assert (tmp_path / "said").read_text() == "waiting for another process to test"


def wait_for(path, said):
    prepared.log.info = lambda text, purpose: said.write_text(text % purpose)
    with prepared.one_process(path, "test"):
        pass
