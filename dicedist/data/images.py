"""Open one image with PIL or refuse it, make it upright, convert it to gray or RGB, and fit it to a square."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from dicedist.data.reading import reason

ORIENTATION = 0x0112  # the EXIF tag
MOST_PIXELS, LONGEST_SIDE, MOST_ELONGATED = 200_000_000, 50_000, 1000  # limits for an image that is decoded
Fit = Callable[[Image.Image, int], Image.Image]  # fits an image to a square of that size
MODES = {1: "L", 3: "RGB"}  # channels of an image file -> the name that PIL has for them


def shrink_and_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize the short side to size and keep the middle of the long side, with the same pixel positions as DALI."""
    width, height = (int(side * size / min(image.size) + 0.5) for side in image.size)
    return crop(image.resize((width, height), Image.Resampling.BILINEAR), size)


def crop(image: Image.Image, size: int) -> Image.Image:
    left, top = ((side - size + 1) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


def decode_file(
    file: Path | io.BytesIO, size: int, fit: Fit = shrink_and_crop, channels: int = 3
) -> NDArray[np.uint8] | str:
    """Return the image as uint8 [size, size, C], or the reason why it cannot be decoded."""
    refuse_channels(channels)
    try:
        with open_image(file) as image:
            return fit_image(image, size, channels, fit)
    except Exception as error:  # a damaged file makes PIL raise anything, from SyntaxError to struct.error
        return reason(error)


def open_image(file: Path | io.BytesIO) -> Image.Image:
    """Read only the head. Refuse special files and images of gigabytes before anything is decoded."""
    if isinstance(file, Path) and not file.is_file():
        raise ValueError("there is no such file" if not file.exists() else "not a plain file")
    image = Image.open(file)
    short, long = sorted(image.size)
    if short * long > MOST_PIXELS or long > LONGEST_SIDE or long > MOST_ELONGATED * short:
        image.close()
        raise ValueError(
            f"{image.size[0]} x {image.size[1]} pixels: the most are {MOST_PIXELS / 1e6:.0f} million, "
            f"{LONGEST_SIDE:,} on a side, and sides that differ by a factor of {MOST_ELONGATED}"
        )
    return image


def refuse_channels(channels: int) -> None:
    if channels not in MODES:
        raise ValueError(f"image files have 1 or 3 channels, not {channels}: give arrays [N, H, W, {channels}]")


def fit_image(image: Image.Image, size: int, channels: int, fit: Fit = shrink_and_crop) -> NDArray[np.uint8]:
    """Return uint8 [size, size, C] with one or three channels, in writable memory, which torch needs."""
    return np.atleast_3d(np.array(fit(upright(image, channels), size)))


def fit_array(image_HWC: NDArray[np.uint8], size: int, fit: Fit = shrink_and_crop) -> NDArray[np.uint8]:
    """Return uint8 [size, size, C]. PIL resizes three channels at once, other numbers channel by channel."""
    bands = [image_HWC] if image_HWC.shape[2] == 3 else np.moveaxis(image_HWC, 2, 0)
    return np.dstack([np.asarray(fit(Image.fromarray(np.ascontiguousarray(band)), size)) for band in bands])


def upright(image: Image.Image, channels: int) -> Image.Image:
    """Return the image itself if it is already upright and gray or RGB: a copy would take as long as a crop."""
    refuse_channels(channels)
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would clip the 16 bits to 8 instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def resized(pixels_HWC: Tensor, size: int) -> Tensor:
    """Resize uint8 [H, W, C] to [size, size, C]: as PIL's bilinear resize to 1 of 255 levels, four times as fast."""
    image_1CHW = pixels_HWC[None].permute(0, 3, 1, 2)  # the batch dimension in front makes it channels_last
    square_1CHW = torch.nn.functional.interpolate(image_1CHW, (size, size), mode="bilinear", antialias=True)
    return square_1CHW.permute(0, 2, 3, 1)[0]


def moments(blocks: Iterable[NDArray[np.uint8]]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel over images [..., C], scaled to 0..1."""
    values = np.arange(256) / 255
    counts = np.zeros((1, 256))
    for block in blocks:
        channels = range(block.shape[-1])
        counts = counts + [np.bincount(block[..., channel].ravel(), minlength=256) for channel in channels]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean.tolist(), np.maximum(std, 1 / 255).tolist()  # std is zero if all pixels have one color
