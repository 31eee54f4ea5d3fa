"""Color jitter and TrivialAugment on a batch of images [B, C, H, W] in 0..1, with a strength for every image.

Python loops over operators, never over images. What was drawn lies on the CPU, the images anywhere.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

GRAY = (0.2989, 0.587, 0.114)


def jitter(images_BCHW: Tensor, factors_B3: Tensor) -> Tensor:
    for adjust, factor_B in zip((brightness, contrast, saturation), factors_B3.unbind(1), strict=True):
        images_BCHW = adjust(images_BCHW, broadcast(factor_B, images_BCHW))
    return images_BCHW


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


def broadcast(values_B: Tensor, images_BCHW: Tensor) -> Tensor:
    return values_B.to(images_BCHW.device, non_blocking=True)[:, None, None, None]


def blend(first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
    return (factor * first + (1 - factor) * second).clamp(0, 1)


def gray(images_BCHW: Tensor) -> Tensor:
    weights_C11 = torch.tensor(GRAY, device=images_BCHW.device).view(3, 1, 1)
    return (images_BCHW * weights_C11).sum(1, keepdim=True)


def brightness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, torch.zeros_like(images_BCHW), factor)


def contrast(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, gray(images_BCHW).mean((1, 2, 3), keepdim=True), factor)


def saturation(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    return blend(images_BCHW, gray(images_BCHW), factor)


def sharpness(images_BCHW: Tensor, factor: Tensor) -> Tensor:
    if min(images_BCHW.shape[2:]) <= 2:
        return images_BCHW
    kernel = torch.ones(3, 3, device=images_BCHW.device)
    kernel[1, 1] = 5
    blurred = images_BCHW.clone()
    blurred[:, :, 1:-1, 1:-1] = F.conv2d(images_BCHW, (kernel / kernel.sum()).expand(3, 1, 3, 3), groups=3)
    return blend(images_BCHW, blurred, factor)


def posterize(images_BCHW: Tensor, bits: Tensor) -> Tensor:
    step = 2 ** (8 - bits)
    return (images_BCHW * 255).round().div(step, rounding_mode="floor") * step / 255


def solarize(images_BCHW: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images_BCHW >= threshold, 1 - images_BCHW, images_BCHW)


def autocontrast(images_BCHW: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional  # late: it takes a second, and few runs need it

    return functional.autocontrast(images_BCHW)


def equalize(images_BCHW: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.equalize((images_BCHW * 255).round().byte()) / 255


def warp(images_BCHW: Tensor, **given_B: Tensor) -> Tensor:
    """Take the pixel at (u, v) from the middle out of (a u + b v + x, c u + d v + y), the nearest; black outside."""
    height, width = images_BCHW.shape[2:]
    one_B = torch.ones(len(images_BCHW))
    of = {"a": one_B, "d": one_B, **dict.fromkeys("bcxy", 0 * one_B), **given_B}
    first_B3 = torch.stack([of["a"], of["b"] * height / width, 2 * of["x"] / width], 1)
    second_B3 = torch.stack([of["c"] * width / height, of["d"], 2 * of["y"] / height], 1)
    matrix_B23 = torch.stack([first_B3, second_B3], 1).to(images_BCHW.device, non_blocking=True)
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
    lambda images, strength_B, sign_B: autocontrast(images),
    lambda images, strength_B, sign_B: equalize(images),
)  # fmt: skip
