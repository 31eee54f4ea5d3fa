"""Jitter, TrivialAugment and erasing: every operator against torchvision's, drawn by key, alike in both pipelines."""

import dataclasses

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from dicedist.config import compose_config
from dicedist.data import colours
from dicedist.data.pipeline import Loader
from dicedist.data.sources import load

CPU = torch.device("cpu")
BYTES = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SMOOTH = torch.nn.functional.interpolate(BYTES[:, :, :4, :4].float(), 32, mode="bilinear").round().byte()
STRENGTHS = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
SIGNS = torch.tensor([1.0, -1, 1, -1, 1, -1])


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
    ours = colours.OPERATORS[number](images / 255, STRENGTHS, SIGNS) * 255
    every = zip(images, STRENGTHS.tolist(), SIGNS.tolist(), strict=True)
    theirs = torch.stack([THEIRS[number](image, m, s) for image, m, s in every]).float()
    share_off = ((ours - theirs).abs() > 2.5).float().mean()
    assert share_off < 0.02, share_off  # a warped pixel may fall on the other side of a border


def test_one_operator_for_each_image():
    trivial = torch.tensor([[number / 14 + 0.01, 0.6, 0.9] for number in range(6)])
    images = SMOOTH / 255
    together = colours.trivial(images, trivial)
    for row in range(6):
        alone = colours.OPERATORS[row](images[row : row + 1], trivial[row : row + 1, 1], torch.ones(1))
        assert together[row].equal(alone[0])


def test_erased_rectangles():
    drawn = colours.draw(["erase"], 4000, 0, 1, 2)
    erased = colours.apply(torch.ones(4000, 3, 16, 16), drawn, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)) == 0
    lost = erased[:, 0].float().mean((1, 2))
    assert 0.2 < (lost > 0).float().mean() < 0.3 and lost.max() < 0.45
    for mask in erased[lost > 0][:20, 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert mask.sum() == rows.sum() * columns.sum()  # a whole rectangle
    assert drawn.erase_B5.equal(colours.draw(["jitter", "erase"], 4000, 0, 1, 2).erase_B5)


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
