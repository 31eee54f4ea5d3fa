"""All augmentations of the training inputs: their random draws, and their effect on a batch.

    draw ── crop, flip ── normalize ── cutout ── trivial, jitter ── erase ── noise
            done by the pipeline       done here, for every pipeline

Generators are keyed by (seed, purpose, epoch, step, member). Draws are always for the whole batch; a replica takes its
rows.

Legend: B batch, C channels, H rows, W columns, V values of a vector; a box is (left, top, width, height).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.randomness import generator
from dicedist.config.schema import DataConfig
from dicedist.data.sources import Source

CROP_RATIO = math.log(4 / 3)  # log of the largest ratio between the sides of a crop
JITTER = 0.4  # brightness, contrast and saturation are multiplied by 1 - JITTER to 1 + JITTER
ERASED = 0.25  # the share of images that lose a rectangle (Zhong et al., 2020), of 2 to 33 % of the area
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), math.log(3.3)
GRAY = (0.2989, 0.587, 0.114)


class Drawn(NamedTuple):
    """The draws for the images of a batch, on the CPU. None: this augmentation is off."""

    starts_B2: Tensor  # int32 (y, x) of the crop's corner; pixels outside the image are black
    flips_B: Tensor  # bool
    cutout_B2: Tensor | None  # int32 (y, x), the center of the blanked square
    crops_B4: Tensor | None  # for encoded images, instead of starts_B2: see `boxes`
    jitter_B3: Tensor | None  # factors of brightness, contrast, saturation
    trivial_B3: Tensor | None  # the operator's number, its strength and its sign, all in 0..1
    erase_B5: Tensor | None  # erased if below ERASED; share of the area, log ratio, x and y in 0..1

    def of(self, rows: slice) -> "Drawn":
        return Drawn._make(None if drawn is None else drawn[rows] for drawn in self)


def draw(config: DataConfig, batch: int, seed: int, *where: int, encoded: bool = False) -> Drawn:
    """Draw for (epoch, step), or for (epoch, step, member) if every member has draws of its own."""
    names = config.augmentations

    def uniform(name: str, purpose: str, low: Sequence[float], high: Sequence[float]) -> Tensor | None:
        """Draw uniformly. Each purpose has its own generator, so a new augmentation does not change other draws."""
        if name not in names:
            return None
        shares = torch.rand(batch, len(low), generator=generator("cpu", seed, purpose, *where))
        return torch.tensor(low) + shares * (torch.tensor(high) - torch.tensor(low))

    draws, reach = generator("cpu", seed, "augmentation", *where), padding(config.size)
    starts_B2 = torch.randint(-reach, reach + 1, (batch, 2), generator=draws, dtype=torch.int32)
    flips_B = torch.randint(2, (batch,), generator=draws, dtype=torch.bool)
    cutout_B2 = torch.randint(config.size, (batch, 2), generator=draws, dtype=torch.int32)
    (least, most), (smallest, largest) = config.crop_area, ERASED_AREA
    return Drawn(
        starts_B2 * ("crop" in names),
        flips_B & ("flip" in names),
        cutout_B2 if "cutout" in names else None,
        uniform("crop", "crops", (least, -CROP_RATIO, 0, 0), (most, CROP_RATIO, 1, 1)) if encoded else None,
        uniform("jitter", "jitter", [1 - JITTER] * 3, [1 + JITTER] * 3),
        uniform("trivial", "trivial", [0.0] * 3, [1.0] * 3),
        uniform("erase", "erase", (0, smallest, -ERASED_RATIO, 0, 0), (1, largest, ERASED_RATIO, 1, 1)),
    )


def padding(size: int) -> int:
    """Return how far a crop may reach beyond the image: 4 pixels of 32, and in proportion (8 of 64, 12 of 96)."""
    return size // 8


def with_border(images_NHWC: Tensor) -> Tensor:
    """Put a black border around images, as wide as crops may reach beyond the images."""
    reach = padding(images_NHWC.shape[1])
    return F.pad(images_NHWC, (0, 0, reach, reach, reach, reach))


def places(size: int, rows_B: Tensor, starts_B2: Tensor, flips_B: Tensor) -> Tensor:
    """Return the positions of the crops' pixels in images with borders: int32 [B, H + W].

    The first H values are the starts of lines, the others the columns. rows: the images in the array.
    """
    reach, pixels = padding(size), torch.arange(size, dtype=torch.int32)
    side = size + 2 * reach
    columns_BW = torch.where(flips_B[:, None], pixels.flip(0), pixels) + starts_B2[:, 1:] + reach
    lines_BH = side * (side * rows_B[:, None].int() + pixels + starts_B2[:, :1] + reach)
    return torch.cat([lines_BH, columns_BW], 1)


def crop_and_flip(bordered_NHWC: Tensor, places_BX: Tensor) -> Tensor:
    """Crop and flip with a single gather of pixels."""
    lines_BH, columns_BW = places_BX.chunk(2, 1)
    pixels_BHW = lines_BH[:, :, None] + columns_BW[:, None, :]
    channels = bordered_NHWC.shape[3]
    return bordered_NHWC.view(-1, channels).index_select(0, pixels_BHW.flatten()).view(*pixels_BHW.shape, channels)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: a copy to a GPU is queued, and torch keeps the pinned memory until it is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def boxes(sizes_B2: Tensor, crops_B4: Tensor | None) -> Tensor:
    """Return the boxes of crops in whole pixels [B, 4]. sizes: (width, height) of images. No crops: the middle squares.

    A crop is given by its share of the area, log(width / height), and its place x and y between the borders. A box is
    never wider or higher than the image.
    """
    width_B, height_B = sizes_B2.unbind(1)
    if crops_B4 is None:
        wide_B = high_B = sizes_B2.amin(1)
        x_B = y_B = torch.full_like(wide_B, 0.5)
    else:
        share_B, log_ratio_B, x_B, y_B = crops_B4.unbind(1)
        area_B, ratio_B = share_B * width_B * height_B, log_ratio_B.exp()
        wide_B = (area_B * ratio_B).sqrt().round().clamp_min(1).minimum(width_B)
        high_B = (area_B / ratio_B).sqrt().round().clamp_min(1).minimum(height_B)
    left_B, top_B = (x_B * (width_B - wide_B + 0.999)).floor(), (y_B * (height_B - high_B + 0.999)).floor()
    return torch.stack([left_B, top_B, wide_B, high_B], 1)


class Finish:
    """The augmentations of normalized views. They are the same for all pipelines."""

    def __init__(self, config: DataConfig, source: Source, seed: int, device: torch.device):
        self.config, self.seed, self.device = config, seed, device
        self.mean_C11, self.std_C11 = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (source.mean, source.std))

    def __call__(self, views: Tensor, drawn: Drawn | None, batch: int, rows: slice, *where: int) -> Tensor:
        """Augment one view. drawn: None for vectors and for outputs of a trunk. rows: of the batch, on this rank.

        where: epoch, step and, if every member has its own view, the member.
        """
        views = views if drawn is None else self.disturbed(views, drawn)
        if not self.config.noise:
            return views
        if drawn is None:
            draws = generator("cpu", self.seed, "augmentation", *where)
            noise = self.config.noise * torch.randn((batch, *views.shape[1:]), generator=draws)[rows]
            return views.add_(to_device(noise, self.device))
        draws = generator(self.device, self.seed, "pixels", *where[:2])  # the same for all members
        noise_BCHW = torch.randn((batch, *views.shape[1:]), generator=draws, device=self.device)[rows]
        return torch.addcdiv(views, noise_BCHW, self.std_C11, value=self.config.noise)

    def disturbed(self, views_BCHW: Tensor, drawn: Drawn) -> Tensor:
        if drawn.cutout_B2 is not None:  # DeVries & Taylor, 2017
            corners_B2 = drawn.cutout_B2.flip(1) - self.config.cutout_size // 2
            blank(views_BCHW, torch.cat([corners_B2, torch.full_like(corners_B2, self.config.cutout_size)], 1))
        if drawn.trivial_B3 is not None or drawn.jitter_B3 is not None:
            images_BCHW = (views_BCHW * self.std_C11 + self.mean_C11).clamp(0, 1)
            if drawn.trivial_B3 is not None:
                images_BCHW = trivial(images_BCHW, drawn.trivial_B3)
            if drawn.jitter_B3 is not None:
                images_BCHW = jitter(images_BCHW, drawn.jitter_B3)
            views_BCHW = ((images_BCHW - self.mean_C11) / self.std_C11).contiguous(memory_format=torch.channels_last)
        if drawn.erase_B5 is not None:
            sizes_B2 = torch.tensor(views_BCHW.shape[:1:-1], dtype=torch.float32).expand(len(views_BCHW), 2)
            erased_B1 = drawn.erase_B5[:, :1] < ERASED
            blank(views_BCHW, boxes(sizes_B2, drawn.erase_B5[:, 1:]) * erased_B1)
        return views_BCHW


def blank(views_BCHW: Tensor, boxes_B4: Tensor) -> None:
    """Fill a box of each image with the mean color, in place. A box may reach beyond the image, or be empty."""
    height, width = views_BCHW.shape[2:]
    left_B1, top_B1, wide_B1, high_B1 = boxes_B4.unsqueeze(2).unbind(1)
    x_W, y_H = torch.arange(width), torch.arange(height)
    across_BW, down_BH = (x_W >= left_B1) & (x_W < left_B1 + wide_B1), (y_H >= top_B1) & (y_H < top_B1 + high_B1)
    inside_B1HW = (down_BH[:, :, None] & across_BW[:, None, :])[:, None]
    views_BCHW.masked_fill_(to_device(inside_B1HW, views_BCHW.device), 0)


def jitter(images_BCHW: Tensor, factors_B3: Tensor) -> Tensor:
    for adjust, factor_B in zip((brightness, contrast, saturation), factors_B3.unbind(1), strict=True):
        images_BCHW = adjust(images_BCHW, broadcast(factor_B, images_BCHW))
    return images_BCHW


def trivial(images_BCHW: Tensor, trivial_B3: Tensor) -> Tensor:
    """Apply TrivialAugment, wide (Müller & Hutter, 2021): one operator at one strength for each image."""
    number_B = (trivial_B3[:, 0] * len(OPERATORS)).long().clamp_max(len(OPERATORS) - 1)
    sign_B = torch.where(trivial_B3[:, 2] < 0.5, -1.0, 1.0)
    result = images_BCHW.clone()
    for number, operate in enumerate(OPERATORS):
        rows = (number_B == number).nonzero().flatten()  # on the CPU, where they were drawn: no wait for the device
        if len(rows):
            here = to_device(rows, images_BCHW.device)
            result[here] = operate(images_BCHW[here], trivial_B3[rows, 1], sign_B[rows])
    return result


def broadcast(values_B: Tensor, images_BCHW: Tensor) -> Tensor:
    return to_device(values_B, images_BCHW.device)[:, None, None, None]


def blend(first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
    return (factor * first + (1 - factor) * second).clamp(0, 1)


def gray(images_BCHW: Tensor) -> Tensor:
    weights_C11 = to_device(torch.tensor(GRAY), images_BCHW.device).view(3, 1, 1)
    return (images_BCHW * weights_C11).sum(1, keepdim=True)


def brightness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, torch.zeros_like(images_BCHW), factor)


def contrast(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, gray(images_BCHW).mean((1, 2, 3), keepdim=True), factor)


def saturation(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, gray(images_BCHW), factor)


def sharpness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    kernel = to_device(torch.tensor([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]]), images_BCHW.device)
    blurred = images_BCHW.clone()
    blurred[:, :, 1:-1, 1:-1] = F.conv2d(images_BCHW, (kernel / kernel.sum()).expand(3, 1, 3, 3), groups=3)
    return blend(images_BCHW, blurred, factor)


def posterize(images_BCHW: Tensor, bits: Tensor) -> Tensor:
    step = 2 ** (8 - bits)
    return (images_BCHW * 255).round().div(step, rounding_mode="floor") * step / 255


def solarize(images_BCHW: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images_BCHW >= threshold, 1 - images_BCHW, images_BCHW)


def by_torchvision(name: str, images_BCHW: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional  # imported late: this takes a second, and few runs need it

    return getattr(functional, name)(images_BCHW)


def warp(images_BCHW: Tensor, **given_B: Tensor) -> Tensor:
    """Give the pixel (u, v), seen from the middle, the nearest pixel of (a u + b v + x, c u + d v + y), or black."""
    height, width = images_BCHW.shape[2:]
    one_B = torch.ones(len(images_BCHW))
    of = {"a": one_B, "d": one_B, **dict.fromkeys("bcxy", 0 * one_B), **given_B}
    first_B3 = torch.stack([of["a"], of["b"] * height / width, 2 * of["x"] / width], 1)
    second_B3 = torch.stack([of["c"] * width / height, of["d"], 2 * of["y"] / height], 1)
    matrix_B23 = to_device(torch.stack([first_B3, second_B3], 1), images_BCHW.device)
    grid = F.affine_grid(matrix_B23, list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW, grid, "nearest", "zeros", align_corners=False)


def rotate(images_BCHW: Tensor, strength_B: Tensor, sign_B: Tensor) -> Tensor:
    angle_B = strength_B * sign_B * 135 * math.pi / 180
    return warp(images_BCHW, a=angle_B.cos(), b=-angle_B.sin(), c=angle_B.sin(), d=angle_B.cos())


def enhanced(adjust: Callable[[Tensor, Tensor], Tensor]) -> "Operator":
    return lambda images, strength_B, sign_B: adjust(images, broadcast(1 + 0.99 * strength_B * sign_B, images))


Operator = Callable[[Tensor, Tensor, Tensor], Tensor]  # images, strengths in 0..1, signs
OPERATORS: tuple[Operator, ...] = (
    lambda images, strength_B, sign_B: images,
    lambda images, strength_B, sign_B: warp(images, b=0.99 * strength_B * sign_B),
    lambda images, strength_B, sign_B: warp(images, c=0.99 * strength_B * sign_B),
    lambda images, strength_B, sign_B: warp(images, x=(32 * strength_B).floor() * sign_B),
    lambda images, strength_B, sign_B: warp(images, y=(32 * strength_B).floor() * sign_B),
    rotate, enhanced(brightness), enhanced(saturation), enhanced(contrast), enhanced(sharpness),
    lambda images, strength_B, sign_B: posterize(images, broadcast(8 - (6 * strength_B).round(), images)),
    lambda images, strength_B, sign_B: solarize(images, broadcast(1 - strength_B, images)),
    lambda images, strength_B, sign_B: by_torchvision("autocontrast", images),
    lambda images, strength_B, sign_B: by_torchvision("equalize", (images * 255).round().byte()) / 255,
)  # fmt: skip
