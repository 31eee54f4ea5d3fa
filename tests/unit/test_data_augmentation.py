"""Augmentations: drawn by key and uniformly, every operator against torchvision's, alike in both pipelines."""

import dataclasses

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from dicedist.config import compose_config
from dicedist.data.augmentation import OPERATORS, Finish, draw, trivial
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source, Split, load

CPU = torch.device("cpu")
B = 128
BYTES = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SMOOTH = torch.nn.functional.interpolate(BYTES[:, :, :4, :4].float(), 32, mode="bilinear").round().byte()
STRENGTHS = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
SIGNS = torch.tensor([1.0, -1, 1, -1, 1, -1])


def test_augmentation_is_uniform(data_config):
    drawn = draw(data_config("cifar100", augment="cutout"), 90_000, 0, 0, 0)
    for axis in range(2):
        counts = (drawn.starts_B2[:, axis] + 4).bincount(minlength=9)
        assert len(counts) == 9 and (counts - 10_000).abs().max() < 500
        assert len(drawn.cutout_B2[:, axis].unique()) == 32
    assert abs(drawn.flips_B.float().mean() - 0.5) < 0.01
    pairs = torch.stack([drawn.starts_B2[:, 0], drawn.starts_B2[:, 1], drawn.flips_B.int()]).float()
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 0.02


def test_augmentation_has_its_keys(data_config):
    config = data_config("cifar100")
    shared = draw(config, B, 0, 1, 2).starts_B2
    others = [
        draw(config, B, 1, 1, 2),
        draw(config, B, 0, 2, 2),
        draw(config, B, 0, 1, 3),
        draw(config, B, 0, 1, 2, 0),
        draw(config, B, 0, 1, 2, 1),
    ]
    starts = [shared, *(other.starts_B2 for other in others)]
    assert shared.equal(draw(config, B, 0, 1, 2).starts_B2)
    assert not any(starts[i].equal(starts[j]) for i in range(6) for j in range(i))


def test_crops_reach_as_far_as_the_image_is_large(data_config):
    large = draw(data_config("folder", size=96), 10_000, 0, 0, 0)
    assert large.starts_B2.min() == -12 and large.starts_B2.max() == 12
    still = draw(data_config("cifar100", augment="none"), 10, 0, 0, 0)
    assert not still.starts_B2.any() and not still.flips_B.any() and still.cutout_B2 is None


def affine(image, angle=0.0, translate=(0, 0), shear=(0.0, 0.0)):
    return reference.affine(image, angle, list(translate), 1.0, list(shear), InterpolationMode.NEAREST)


def degrees(slope):
    return torch.atan(torch.tensor(slope)).rad2deg().item()


# As torchvision's TrivialAugmentWide calls them, with shears about the middle.
THEIRS = [
    lambda image, m, s: image,
    lambda image, m, s: affine(image, shear=(degrees(0.99 * m * s), 0.0)),
    lambda image, m, s: affine(image, shear=(0.0, degrees(0.99 * m * s))),
    lambda image, m, s: affine(image, translate=(-int(32 * m) * int(s), 0)),
    lambda image, m, s: affine(image, translate=(0, -int(32 * m) * int(s))),
    lambda image, m, s: reference.rotate(image, 135 * m * s, InterpolationMode.NEAREST),
    lambda image, m, s: reference.adjust_brightness(image, 1 + 0.99 * m * s),
    lambda image, m, s: reference.adjust_saturation(image, 1 + 0.99 * m * s),
    lambda image, m, s: reference.adjust_contrast(image, 1 + 0.99 * m * s),
    lambda image, m, s: reference.adjust_sharpness(image, 1 + 0.99 * m * s),
    lambda image, m, s: reference.posterize(image, 8 - round(6 * m)),
    lambda image, m, s: reference.solarize(image, 255 * (1 - m)),
    lambda image, m, s: reference.autocontrast(image),
    lambda image, m, s: reference.equalize(image),
]


@pytest.mark.parametrize("number", range(len(THEIRS)))
@pytest.mark.parametrize("images", [BYTES, SMOOTH], ids=["noise", "smooth"])
def test_operators_are_torchvisions(number, images):
    ours = OPERATORS[number](images / 255, STRENGTHS, SIGNS) * 255
    every = zip(images, STRENGTHS.tolist(), SIGNS.tolist(), strict=True)
    theirs = torch.stack([THEIRS[number](image, m, s) for image, m, s in every]).float()
    share_off = ((ours - theirs).abs() > 2.5).float().mean()
    assert share_off < 0.02, share_off  # a warped pixel may fall on the other side of a border


def test_one_operator_for_each_image():
    drawn = torch.tensor([[number / 14 + 0.01, 0.6, 0.9] for number in range(6)])
    images = SMOOTH / 255
    together = trivial(images, drawn)
    for row in range(6):
        alone = OPERATORS[row](images[row : row + 1], drawn[row : row + 1, 1], torch.ones(1))
        assert together[row].equal(alone[0])


def test_erased_rectangles(data_config):
    config = data_config("shapes", augment=["erase"], size=16)
    drawn = draw(config, 4000, 0, 1, 2)
    source = Source("shapes", ["one"], (0, 0, 0), (1, 1, 1), 16, *[Split(None, torch.zeros(1))] * 3, "digest")
    views = torch.ones(4000, 3, 16, 16)
    erased = Finish(config, source, 0, CPU)(views, drawn, 4000, slice(None), 1, 2) == 0
    lost = erased[:, 0].float().mean((1, 2))
    assert 0.2 < (lost > 0).float().mean() < 0.3 and lost.max() < 0.45
    for mask in erased[lost > 0][:20, 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert mask.sum() == rows.sum() * columns.sum()  # a whole rectangle
    more = dataclasses.replace(config, augment=["jitter", "erase"])
    assert drawn.erase_B5.equal(draw(more, 4000, 0, 1, 2).erase_B5)


def test_both_pipelines_and_any_replica(data_config):
    pytest.importorskip("nvidia.dali")
    config = data_config("shapes", train_limit=40, augment=["crop", "flip", "jitter", "trivial", "erase"])
    source = load(config)

    def batches(backend, **more):
        changed = dataclasses.replace(config, pipeline=backend)
        return list(Loader(source.train, changed, source, 16, 0, CPU, **{"members": [0], **more}).epoch(1))

    ours, dalis = batches("torch"), batches("dali")
    for one, other in zip(ours, dalis, strict=True):
        different = ((one.images[0] - other.images[0]).abs() > 1e-4).float().mean()
        assert different < 0.02  # rounding may move a level across a threshold of posterize, solarize or equalize
    assert torch.allclose(batches("torch", replica=1, replicas=2)[0].images[0], ours[0].images[0][8:], atol=1e-5)
    plain = dataclasses.replace(config, augment=["crop", "flip"])
    basic = dataclasses.replace(config, augment="basic")
    first, second = (next(Loader(source.train, c, source, 16, 0, CPU, [0]).epoch(1)) for c in (plain, basic))
    assert first.images[0].equal(second.images[0]) and not first.images[0].equal(ours[0].images[0])


def test_what_may_be_written():
    assert compose_config(["data.augment=[flip,trivial]"]).data.augmentations == ("flip", "trivial")
    assert compose_config(["data.augment=cutout"]).data.augmentations == ("crop", "flip", "cutout")
    for wrong in ("[flip,blur]", "strong"):
        with pytest.raises(ValueError, match="write one of basic, none, cutout, or a list of some of crop, flip"):
            compose_config([f"data.augment={wrong}"])
