"""One image in PIL: what may be decoded, how it is made upright and RGB, and how it is brought to a square."""

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

ORIENTATION = 0x0112  # the EXIF tag
MOST_PIXELS, LONGEST_SIDE, MOST_ELONGATED = 200_000_000, 50_000, 1000  # of an image that is decoded


def shrink_and_crop(image: Image.Image, size: int) -> Image.Image:
    """Resizes the short side to size and keeps the middle of the long one; every pixel is where DALI puts it."""
    width, height = (int(side * size / min(image.size) + 0.5) for side in image.size)
    return crop(image.resize((width, height), Image.Resampling.BILINEAR), size)


def crop(image: Image.Image, size: int) -> Image.Image:
    left, top = ((side - size + 1) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


def refuse_outsized(image: Image.Image) -> None:
    short, long = sorted(image.size)
    if short * long > MOST_PIXELS or long > LONGEST_SIDE or long > MOST_ELONGATED * short:
        raise ValueError(
            f"{image.size[0]} x {image.size[1]} pixels: the most are {MOST_PIXELS / 1e6:.0f} million, "
            f"{LONGEST_SIDE:,} on a side, and sides that differ by a factor of {MOST_ELONGATED}"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """The image itself where it is upright and RGB already: a copy would take as long as a crop."""
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would clip the 16 bits to 8 instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(pixels_HWC: Tensor, size: int) -> Tensor:
    """uint8 [H, W, 3] -> [size, size, 3], as PIL's bilinear resize to one level of 255, four times as fast."""
    image_1CHW = pixels_HWC[None].permute(0, 3, 1, 2)  # channels_last, as only the batch in front makes it
    square_1CHW = torch.nn.functional.interpolate(image_1CHW, (size, size), mode="bilinear", antialias=True)
    return square_1CHW.permute(0, 2, 3, 1)[0]
