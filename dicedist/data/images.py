"""One image in PIL: what may be decoded, how it is made upright and RGB, and how it is brought to a square."""

import numpy as np
from PIL import Image, ImageOps

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
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would clip the 16 bits to 8 instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")
