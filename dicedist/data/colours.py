"""What changes an image beyond its crop and flip: jitter, TrivialAugment, random erasing. The same for both pipelines.

Numbers are drawn here by key; the work is done on the views of a whole batch, on their device, whichever pipeline made
them. Python loops over operators, never over images.

Legend: B batch, C colours, H rows, W columns.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.randomness import generator

JITTER = 0.4  # brightness, contrast and saturation are multiplied by 1 - JITTER to 1 + JITTER
ERASED = 0.25  # the share of images that lose a rectangle (Zhong et al., 2020), of 2 to 33 % of the area
AREA, RATIO = (0.02, 0.33), math.log(3.3)
GREY = (0.2989, 0.587, 0.114)
NAMES = ("jitter", "trivial", "erase")


class Drawn(NamedTuple):
    """What was drawn for every image, on the CPU; None: not asked for."""

    jitter_B3: Tensor | None  # factors of brightness, contrast, saturation
    trivial_B3: Tensor | None  # the operator's number, its strength in 0..1, its sign
    erase_B5: Tensor | None  # whether, and the rectangle: share of the area, log ratio, x and y in 0..1

    def of(self, rows: slice) -> "Drawn":
        return Drawn._make(None if drawn is None else drawn[rows] for drawn in self)


def draw(names: Sequence[str], batch: int, seed: int, *where: int) -> Drawn:
    """Every kind has a generator of its own: adding one does not change what another draws."""

    def uniform(name: str, low: Sequence[float], high: Sequence[float]) -> Tensor | None:
        if name not in names:
            return None
        shares = torch.rand(batch, len(low), generator=generator("cpu", seed, name, *where))
        return torch.tensor(low) + shares * (torch.tensor(high) - torch.tensor(low))

    rectangle = ((AREA[0], -RATIO, 0.0, 0.0), (AREA[1], RATIO, 1.0, 1.0))
    return Drawn(
        uniform("jitter", [1 - JITTER] * 3, [1 + JITTER] * 3),
        uniform("trivial", [0.0] * 3, [1.0] * 3),
        uniform("erase", (0.0, *rectangle[0]), (1.0, *rectangle[1])),
    )


def apply(views_BCHW: Tensor, drawn: Drawn, mean_C11: Tensor, std_C11: Tensor) -> Tensor:
    """Changes the colours of normalised images, in 0..1; an erased rectangle has the mean colour."""
    if drawn.jitter_B3 is not None or drawn.trivial_B3 is not None:
        images_BCHW = (views_BCHW * std_C11 + mean_C11).clamp(0, 1)
        if drawn.trivial_B3 is not None:
            images_BCHW = trivial(images_BCHW, drawn.trivial_B3)
        if drawn.jitter_B3 is not None:
            for adjust, factor_B in zip((brightness, contrast, saturation), drawn.jitter_B3.unbind(1), strict=True):
                images_BCHW = adjust(images_BCHW, broadcast(factor_B, images_BCHW))
        views_BCHW = ((images_BCHW - mean_C11) / std_C11).contiguous(memory_format=torch.channels_last)
    return views_BCHW if drawn.erase_B5 is None else erase(views_BCHW, drawn.erase_B5)


def broadcast(values_B: Tensor, images_BCHW: Tensor) -> Tensor:
    return values_B.to(images_BCHW.device, non_blocking=True)[:, None, None, None]


def erase(views_BCHW: Tensor, erase_B5: Tensor) -> Tensor:
    height, width = views_BCHW.shape[2:]
    share_B, log_ratio_B = erase_B5[:, 1], erase_B5[:, 2]
    wide_B = (share_B * height * width * log_ratio_B.exp()).sqrt().round().clamp(1, width)
    high_B = (share_B * height * width / log_ratio_B.exp()).sqrt().round().clamp(1, height)
    left_B = (erase_B5[:, 3] * (width - wide_B + 0.999)).floor()
    top_B = (erase_B5[:, 4] * (height - high_B + 0.999)).floor()
    x_W, y_H = torch.arange(width), torch.arange(height)
    across_BW = (x_W >= left_B[:, None]) & (x_W < (left_B + wide_B)[:, None]) & (erase_B5[:, :1] < ERASED)
    down_BH = (y_H >= top_B[:, None]) & (y_H < (top_B + high_B)[:, None])
    inside_B1HW = (down_BH[:, :, None] & across_BW[:, None, :])[:, None]
    return views_BCHW.masked_fill(inside_B1HW.to(views_BCHW.device, non_blocking=True), 0)


def trivial(images_BCHW: Tensor, trivial_B3: Tensor) -> Tensor:
    """TrivialAugment, wide (Müller & Hutter, 2021): of each image one operator, at one strength."""
    number_B = (trivial_B3[:, 0] * len(OPERATORS)).long().clamp_max(len(OPERATORS) - 1)
    sign_B = torch.where(trivial_B3[:, 2] < 0.5, -1.0, 1.0)
    result = images_BCHW.clone()
    for number, operate in enumerate(OPERATORS):
        rows = (number_B == number).nonzero().flatten()  # on the CPU, where it was drawn: the device does not wait
        if len(rows):
            here = rows.to(images_BCHW.device, non_blocking=True)
            result[here] = operate(images_BCHW[here], trivial_B3[rows, 1], sign_B[rows])
    return result


def blend(first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
    return (factor * first + (1 - factor) * second).clamp(0, 1)


def grey(images_BCHW: Tensor) -> Tensor:
    weights_C11 = torch.tensor(GREY, device=images_BCHW.device).view(3, 1, 1)
    return (images_BCHW * weights_C11).sum(1, keepdim=True)


def brightness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, torch.zeros_like(images_BCHW), factor)


def contrast(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, grey(images_BCHW).mean((1, 2, 3), keepdim=True), factor)


def saturation(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, grey(images_BCHW), factor)


def sharpness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    if min(images_BCHW.shape[2:]) <= 2:
        return images_BCHW
    kernel = torch.ones(3, 3, device=images_BCHW.device)
    kernel[1, 1] = 5
    smooth = F.conv2d(images_BCHW, (kernel / kernel.sum()).expand(3, 1, 3, 3), groups=3)
    blurred = images_BCHW.clone()
    blurred[:, :, 1:-1, 1:-1] = smooth
    return blend(images_BCHW, blurred, factor)


def posterize(images_BCHW: Tensor, bits: Tensor) -> Tensor:
    step = 2 ** (8 - bits)
    return (images_BCHW * 255).round().div(step, rounding_mode="floor") * step / 255


def solarize(images_BCHW: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images_BCHW >= threshold, 1 - images_BCHW, images_BCHW)


def autocontrast(images_BCHW: Tensor) -> Tensor:
    low, high = images_BCHW.amin((2, 3), keepdim=True), images_BCHW.amax((2, 3), keepdim=True)
    flat = high <= low
    return torch.where(flat, images_BCHW, (images_BCHW - low) / torch.where(flat, 1, high - low)).clamp(0, 1)


def equalize(images_BCHW: Tensor) -> Tensor:
    """Spreads the levels of every colour by itself so that each is as frequent, as PIL does it."""
    levels_XP = (images_BCHW * 255).round().long().flatten(0, 1).flatten(1)
    counts_XL = torch.zeros(len(levels_XP), 256, device=levels_XP.device, dtype=torch.long)
    counts_XL.scatter_add_(1, levels_XP, torch.ones_like(levels_XP))
    last_X1 = counts_XL.gather(1, levels_XP.amax(1, keepdim=True))
    step_X1 = (levels_XP.shape[1] - last_X1) // 255
    below_XL = counts_XL.cumsum(1) - counts_XL
    table_XL = ((below_XL + step_X1 // 2) // step_X1.clamp_min(1)).clamp(0, 255)
    equal_XP = torch.where(step_X1 > 0, table_XL.gather(1, levels_XP), levels_XP)
    return equal_XP.view(images_BCHW.shape) / 255


def warp(images_BCHW: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The pixel at (u, v) from the middle comes from (a u + b v + x, c u + d v + y), the nearest; black outside."""
    height, width = images_BCHW.shape[2:]
    first_B3 = torch.stack([a, b * height / width, 2 * x / width], 1)
    second_B3 = torch.stack([c * width / height, d, 2 * y / height], 1)
    matrix_B23 = torch.stack([first_B3, second_B3], 1).to(images_BCHW.device, non_blocking=True)
    grid = F.affine_grid(matrix_B23, list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW, grid, "nearest", "zeros", align_corners=False)


def shear(horizontal: bool) -> "Operator":
    def operate(images: Tensor, strength_B: Tensor, sign_B: Tensor) -> Tensor:
        one_B, zero_B, slope_B = torch.ones_like(strength_B), torch.zeros_like(strength_B), 0.99 * strength_B * sign_B
        across_B, down_B = (slope_B, zero_B) if horizontal else (zero_B, slope_B)
        return warp(images, one_B, across_B, down_B, one_B, zero_B, zero_B)

    return operate


def translate(horizontal: bool) -> "Operator":
    def operate(images: Tensor, strength_B: Tensor, sign_B: Tensor) -> Tensor:
        one_B, zero_B = torch.ones_like(strength_B), torch.zeros_like(strength_B)
        way_B = (32 * strength_B).floor() * sign_B
        x_B, y_B = (way_B, zero_B) if horizontal else (zero_B, way_B)
        return warp(images, one_B, zero_B, zero_B, one_B, x_B, y_B)

    return operate


def rotate(images_BCHW: Tensor, strength_B: Tensor, sign_B: Tensor) -> Tensor:
    angle_B, zero_B = strength_B * sign_B * 135 * math.pi / 180, torch.zeros_like(strength_B)
    return warp(images_BCHW, angle_B.cos(), -angle_B.sin(), angle_B.sin(), angle_B.cos(), zero_B, zero_B)


def enhanced(adjust: Callable[[Tensor, Tensor], Tensor]) -> "Operator":
    def operate(images: Tensor, strength_B: Tensor, sign_B: Tensor) -> Tensor:
        return adjust(images, broadcast(1 + 0.99 * strength_B * sign_B, images))

    return operate


Operator = Callable[[Tensor, Tensor, Tensor], Tensor]  # images, strengths in 0..1, signs
OPERATORS: tuple[Operator, ...] = (
    lambda images, strength_B, sign_B: images,
    shear(True), shear(False), translate(True), translate(False), rotate,
    enhanced(brightness), enhanced(saturation), enhanced(contrast), enhanced(sharpness),
    lambda images, strength_B, sign_B: posterize(images, broadcast(8 - (6 * strength_B).round(), images)),
    lambda images, strength_B, sign_B: solarize(images, broadcast(1 - strength_B, images)),
    lambda images, strength_B, sign_B: autocontrast(images),
    lambda images, strength_B, sign_B: equalize(images),
)  # fmt: skip
