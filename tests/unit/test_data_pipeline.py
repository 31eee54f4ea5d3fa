"""Both pipelines against torchvision's own crop, flip and normalize, on real images, and against each other."""

import builtins
import dataclasses
import itertools
import logging

import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as reference

from dicedist import data
from dicedist.data import pipeline
from dicedist.data.augmentation import draw
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader, RawBatch, TorchPipeline, evaluation_batches, pipeline_for
from dicedist.data.sources import Split, load

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BACKENDS = ["torch", "dali"]


@pytest.fixture(autouse=True)
def need_dali(request):
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "dali":
        pytest.importorskip("nvidia.dali")


@pytest.fixture(scope="module")
def cifar(real_data, data_config):
    """1,000 training images of CIFAR-100."""
    source = load(data_config("cifar100"))
    few = Split(source.train.images_NHWC[:1000].clone(), source.train.labels_N[:1000])
    return dataclasses.replace(source, train=few)


def loader(source, config, backend, members=(0,), seed=0, batch_size=128):
    config = dataclasses.replace(config, pipeline=backend)
    return Loader(source.train, config, source, batch_size, seed, CPU, members)


def by_torchvision(image_HWC, start, flip, source):
    padded = reference.pad(Image.fromarray(image_HWC.numpy()), [4])
    image = reference.crop(padded, int(start[0]) + 4, int(start[1]) + 4, 32, 32)
    image = reference.hflip(image) if flip else image
    return reference.normalize(reference.to_tensor(image), source.mean, source.std)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_torchvisions(cifar, data_config, backend):
    config = data_config("cifar100")
    batch = next(iter(loader(cifar, config, backend).epoch(4)))
    drawn = draw(config, 128, 0, 4, 0)
    images = cifar.train.take(batch.indices_B)
    expected = [by_torchvision(*one, cifar) for one in zip(images, drawn.starts_B2, drawn.flips_B, strict=True)]
    (views,) = batch.images
    assert torch.allclose(views, torch.stack(expected), rtol=0, atol=1e-6)
    assert views.dtype == torch.float32 and views.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels_B.equal(cifar.train.labels_N[batch.indices_B])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_whose_step_mixes_reads_whole_pairs(cifar, data_config, backend):
    config = data_config("cifar100", pipeline=backend)
    whole = next(loader(cifar, config, backend, batch_size=9).epoch(1))
    for replica, rows, loaded in ((0, slice(0, 3), slice(0, 4)), (1, slice(3, 6), slice(2, 6))):
        found = next(Loader(cifar.train, config, cifar, 9, 0, CPU, [0], replica, 3, mixes=True).epoch(1))
        assert found.rows == rows and found.indices_B.equal(whole.indices_B[loaded])
        assert found.labels_B.equal(whole.labels_B[loaded]) and found.images[0].equal(whole.images[0][loaded])
        assert found.trimmed().images[0].equal(whole.images[0][rows])
        plain = next(Loader(cifar.train, config, cifar, 9, 0, CPU, [0], replica, 3).epoch(1))
        assert plain.images[0].equal(whole.images[0][rows]) and plain.margin == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_crop_and_flip(cifar, data_config, backend):
    """All 9 x 9 x 2 augmentations, corners included."""
    config = data_config("cifar100", pipeline=backend)
    every = torch.tensor(list(itertools.product(range(-4, 5), range(-4, 5), (0, 1))), dtype=torch.int32)
    drawn = draw(config, len(every), 0, 0, 0)._replace(starts_B2=every[:, :2], flips_B=every[:, 2].bool())
    images = cifar.train.take(torch.arange(len(every)))
    (views,) = pipeline_for(config, cifar, len(every), CPU).stream([RawBatch(images, drawn)])
    expected = [by_torchvision(*one, cifar) for one in zip(images, drawn.starts_B2, drawn.flips_B, strict=True)]
    assert torch.allclose(views, torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cutout_blanks_a_square(cifar, data_config, backend):
    config = data_config("cifar100", augment="cutout", cutout_size=9)
    batch = next(iter(loader(cifar, config, backend).epoch(0)))
    drawn = draw(config, 128, 0, 0, 0)
    uncut = TorchPipeline(config, cifar, CPU)
    expected = uncut.view(RawBatch(cifar.train.take(batch.indices_B), drawn))
    for image, (y, x) in zip(expected, drawn.cutout_B2.tolist(), strict=True):
        image[:, max(y - 4, 0) : y + 5, max(x - 4, 0) : x + 5] = 0
    assert torch.allclose(batch.images[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("augment", ["basic", "none", "cutout"])
def test_dali_equals_torch(real_data, data_config, name, augment):
    pytest.importorskip("nvidia.dali")
    source = load(data_config(name))
    config = data_config(name, augment=augment, num_threads=2)
    last = num_batches(len(source.train), 500) - 6
    pairs = zip(*(loader(source, config, backend, batch_size=500).epoch(7, last) for backend in BACKENDS), strict=True)
    for ours, dalis in pairs:
        assert ours.checksum == dalis.checksum and ours.labels_B.equal(dalis.labels_B)
        assert torch.allclose(ours.images[0], dalis.images[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_restart_in_the_middle_of_an_epoch(cifar, data_config, backend):
    config = data_config("cifar100")
    whole = list(loader(cifar, config, backend).epoch(2))  # all held at once: no view may be overwritten
    assert [len(batch.labels_B) for batch in whole] == [128] * 7 + [104]
    assert torch.cat([batch.indices_B for batch in whole]).sort().values.equal(torch.arange(1000))
    rest = list(loader(cifar, config, backend).epoch(2, start=5))
    assert [batch.step_in_epoch for batch in rest] == [5, 6, 7]
    for ours, theirs in zip(whole[5:], rest, strict=True):
        assert ours.checksum == theirs.checksum and ours.images[0].equal(theirs.images[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_abandoned_epoch_leaves_nothing_behind(cifar, data_config, backend):
    config = data_config("cifar100")
    used = loader(cifar, config, backend)
    for batch in used.epoch(0):
        if batch.step_in_epoch == 2:
            break
    after, expected = list(used.epoch(1)), list(loader(cifar, config, backend).epoch(1))
    assert len(after) == len(expected) == 8
    assert all(a.images[0].equal(b.images[0]) for a, b in zip(after, expected, strict=True))
    assert list(used.epoch(1, start=8)) == []
    used.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_member", [False, True])
def test_placements_agree(cifar, data_config, backend, per_member):
    """Four members in one process agree with one member on each of four ranks, and with the discriminator's rank."""
    config = data_config("cifar100", per_member=per_member)
    together = list(loader(cifar, config, backend, members=range(4)).epoch(0))
    for member in range(4):
        alone = loader(cifar, config, backend, members=[member]).epoch(0)
        for ours, theirs in zip(together, alone, strict=True):
            assert ours.checksum == theirs.checksum and len(theirs.images) == 1
            assert ours.images[member if per_member else 0].equal(theirs.images[0])
    views = together[0].images
    assert len(views) == (4 if per_member else 1)
    assert not any(views[i].equal(views[j]) for i in range(len(views)) for j in range(i))
    labels_only = dataclasses.replace(cifar, train=Split(None, cifar.train.labels_N))
    for ours, theirs in zip(together, loader(labels_only, config, backend, members=()).epoch(0), strict=True):
        assert ours.checksum == theirs.checksum and theirs.images == [] and ours.labels_B.equal(theirs.labels_B)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_make_no_difference(cifar, data_config, backend):
    one, two = (
        list(loader(cifar, data_config("cifar100", num_threads=threads), backend).epoch(0)) for threads in (1, 2)
    )
    assert all(a.images[0].equal(b.images[0]) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_draws_are_computed_once(cifar, data_config, backend, monkeypatch):
    calls = []
    for name in ("epoch_order", "draw"):
        real = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *a, n=name, f=real, **k: calls.append(n) or f(*a, **k))
    list(loader(cifar, data_config("cifar100"), backend).epoch(0))
    assert calls == ["epoch_order", *["draw"] * 8]


def test_evaluation_sees_the_images_as_they_are(cifar):
    batches = list(evaluation_batches(cifar.train, cifar, 300, CPU))
    assert [len(labels) for _, labels in batches] == [300, 300, 300, 100]
    assert list(evaluation_batches(Split(cifar.train.inputs_R, torch.empty(0)), cifar, 300, CPU)) == []
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert labels.equal(cifar.train.labels_N)
    expected = [by_torchvision(image, (0, 0), False, cifar) for image in cifar.train.images_NHWC[:50]]
    assert torch.allclose(images[:50], torch.stack(expected), rtol=0, atol=1e-6)


@pytest.fixture
def without_dali(monkeypatch):
    real_import = builtins.__import__

    def refusing(name, *args, **kwargs):
        if name.startswith("nvidia.dali"):
            raise ImportError("No module named 'nvidia.dali'")
        return real_import(name, *args, **kwargs)

    data._dali_obstacle.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refusing)
    yield
    data._dali_obstacle.cache_clear()


def test_auto_is_what_is_measured_to_be_faster(cifar, data_config):
    """DALI prepares half as many images from memory as torch (docs/performance.md)."""
    pytest.importorskip("nvidia.dali")
    found = pipeline_for(data_config("cifar100", pipeline="auto"), cifar, 8, CPU)
    assert isinstance(found, TorchPipeline) and found.described == "torch prepares the images"
    chosen = pipeline_for(data_config("cifar100", pipeline="dali"), cifar, 8, CPU)
    assert chosen.described == "DALI prepares the images"


def test_no_dali_for_this_platform(without_dali, cifar, data_config, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pipeline, "RESIDENT", 0)  # too many images for a GPU, which DALI would prepare
    monkeypatch.setattr(pipeline, "TorchPipeline", lambda *given: given)
    for _ in range(2):
        assert pipeline_for(data_config("cifar100"), cifar, 8, CUDA)[-1] == CUDA
    assert len(caplog.records) == 1 and "torch augments the images instead" in caplog.text
    with pytest.raises(ValueError, match="^data.pipeline=dali: DALI cannot be imported here .* data.pipeline=torch$"):
        pipeline_for(data_config("cifar100", pipeline="dali"), cifar, 8, CPU)
