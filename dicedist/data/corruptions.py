"""Corrupted images: the corruptions of CIFAR-C (Hendrycks and Dietterich, 2019), rotations and lower resolutions.

An operator corrupts a batch of images of any size, at a severity from 1 to 5. Its draws depend only on its name, the
severity and the first image of the block. Strengths are those of CIFAR-C; lengths are in proportion to the side.

Departures from CIFAR-C:
motion blur      a sum of shifted images, instead of ImageMagick
fog              tiles of one plasma, which 64 images share
frost, spatter   noise, instead of photographs and of the edges of OpenCV
rounding         to the nearest of 256 levels; CIFAR-C truncates

So figures are comparable between runs that were measured here. To compare with published figures, use the official
files: shift=cifar_c.

Legend: N images, H rows, W columns, C colors; x_NHWC are float32 in 0..1, images_NHWC uint8.
"""

import io
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage, sparse

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]
Operator = Callable[[Floats, int, np.random.Generator], Floats]

SEVERITIES = (1, 2, 3, 4, 5)
BLOCK = 250  # images that share a generator, and fit in the cache
TRUNCATE = 3.0  # Gaussian filters end at this many deviations
GRAY = np.array([0.299, 0.587, 0.114], np.float32)
TURQUOISE = np.array([175, 238, 238], np.float32) / 255
BROWN = np.array([63, 42, 20], np.float32) / 255
ICE = np.array([0.87, 0.95, 1.0], np.float32)


def corrupt(images_NHWC: Bytes, name: str, severity: int, first: int = 0) -> Bytes:
    """Apply one corruption of `OPERATORS`. first: the position of the first image in the whole set."""
    if name not in OPERATORS:
        raise ValueError(f"{name}: there is no such corruption; write one of {', '.join(OPERATORS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity} of {name}: write 1, 2, 3, 4 or 5")
    out_NHWC = np.empty_like(images_NHWC)
    for start in range(0, len(images_NHWC), BLOCK):
        rows = slice(start, start + BLOCK)
        draws = np.random.default_rng([zlib.crc32(name.encode()), severity, first + start])
        x_NHWC = images_NHWC[rows].astype(np.float32) / 255
        spoiled_NHWC = OPERATORS[name](x_NHWC, severity, draws)
        out_NHWC[rows] = np.rint(np.clip(spoiled_NHWC, 0, 1) * 255)
    return out_NHWC


def gaussian_noise(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    deviation = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return x_NHWC + deviation * draws.standard_normal(x_NHWC.shape, np.float32)


def shot_noise(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return (draws.poisson(x_NHWC * photons) / photons).astype(np.float32)


def impulse_noise(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    drawn = draws.random(x_NHWC.shape, np.float32)
    return np.where(drawn < share, (drawn < share / 2).astype(np.float32), x_NHWC)


def speckle_noise(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    deviation = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return x_NHWC * (1 + deviation * draws.standard_normal(x_NHWC.shape, np.float32))


def gaussian_blur(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    return smoothed(x_NHWC, (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1] * side(x_NHWC) / 32)


def defocus_blur(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Blur with a disc whose edge is soft."""
    radius, soft = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    radius *= side(x_NHWC) / 32
    reach = int(radius) + 1
    rows, columns = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    disc = (rows**2 + columns**2 <= radius**2).astype(np.float64)
    near = np.exp(-0.5 * (np.arange(-1, 2) / soft) ** 2)
    kernel = ndimage.convolve(disc / disc.sum(), np.outer(near, near) / near.sum() ** 2, mode="constant")
    padded = np.pad(x_NHWC, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    _, height, width, _ = x_NHWC.shape
    out_NHWC = np.zeros_like(x_NHWC)
    for row, column in zip(*np.nonzero(kernel), strict=True):
        out_NHWC += np.float32(kernel[row, column]) * padded[:, row : row + height, column : column + width]
    return out_NHWC


def glass_blur(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Give each pixel the value of a neighbor, pixel by pixel, in all images at once.

    CIFAR-C intends to swap both pixels, but assigns through views of one array, so the neighbor keeps its value.
    """
    deviation, reach, times = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))[severity - 1]
    scale = side(x_NHWC) / 32
    x_NHWC, every = smoothed(x_NHWC, deviation * scale), np.arange(len(x_NHWC))
    reach = max(1, round(reach * scale))
    _, height, width, _ = x_NHWC.shape
    for _ in range(times):
        offsets = draws.integers(-reach, reach, (height, width, 2, len(x_NHWC)))
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                rows_N, columns_N = row + offsets[row - 1, column - 1, 0], column + offsets[row - 1, column - 1, 1]
                x_NHWC[:, row, column] = x_NHWC[every, rows_N, columns_N]
    return smoothed(x_NHWC, deviation * scale)


def motion_blur(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    radius, deviation = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    return moved(x_NHWC, radius, deviation, np.radians(draws.uniform(-45, 45, len(x_NHWC))))


def zoom_blur(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    return applied(zooming(x_NHWC.shape[1], x_NHWC.shape[2], severity), x_NHWC)


def fog(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    strength, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    brightest_N111 = x_NHWC.max(axis=(1, 2, 3), keepdims=True)
    x_NHWC = x_NHWC + strength * plasma(x_NHWC.shape, decay, draws)[..., None]
    return x_NHWC * brightest_N111 / (brightest_N111 + strength)


def frost(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Draw ridges of a fine plasma, bluish white, over the image."""
    kept, added = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    height_NHW = plasma(x_NHWC.shape, 1.5, draws)
    ridges_NHW = 1 - np.abs(2 * (3 * height_NHW % 1) - 1)
    return kept * x_NHWC + added * (0.35 + 0.65 * ridges_NHW[..., None]) * ICE


def snow(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    mean, deviation, zoom, least, radius, blur, kept = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    flakes_NHW1 = (mean + deviation * draws.standard_normal((*x_NHWC.shape[:3], 1), np.float32)).astype(np.float32)
    flakes_NHW1 = applied(enlarging(*x_NHWC.shape[1:3], zoom), flakes_NHW1)
    flakes_NHW1 = np.clip(np.where(flakes_NHW1 < least, 0, flakes_NHW1), 0, 1)
    flakes_NHW1 = moved(flakes_NHW1, radius, blur, np.radians(draws.uniform(-135, -45, len(x_NHWC))))
    gray_NHW1 = (x_NHWC @ GRAY)[..., None]
    x_NHWC = kept * x_NHWC + (1 - kept) * np.maximum(x_NHWC, 1.5 * gray_NHW1 + 0.5)
    return x_NHWC + flakes_NHW1 + flakes_NHW1[:, ::-1, ::-1]


def spatter(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Draw drops of water, or of mud at the two highest severities."""
    mean, deviation, blur, least, strength, is_mud = (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    )[severity - 1]
    scale = side(x_NHWC) / 32
    liquid_NHW1 = (mean + deviation * draws.standard_normal((*x_NHWC.shape[:3], 1), np.float32)).astype(np.float32)
    liquid_NHW1 = smoothed(liquid_NHW1, blur * scale)
    if is_mud:
        mask_NHW1 = smoothed((liquid_NHW1 > least).astype(np.float32), strength * scale)
        mask_NHW1 = np.where(mask_NHW1 < 0.8, 0, mask_NHW1)
        return x_NHWC * (1 - mask_NHW1) + BROWN * mask_NHW1
    relief_NHW1 = smoothed(np.where(liquid_NHW1 < least, 0, liquid_NHW1), 0.8 * scale)
    highest_N111 = relief_NHW1.max(axis=(1, 2, 3), keepdims=True)
    return x_NHWC + strength * relief_NHW1 / np.maximum(highest_N111, 1e-6) * TURQUOISE


def brightness(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Add to the value of HSV. At equal hue and saturation the colors keep their proportions."""
    added = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    value_NHW1 = x_NHWC.max(axis=3, keepdims=True)
    raised_NHW1 = np.minimum(value_NHW1 + added, 1)
    return np.where(value_NHW1 > 0, x_NHWC * (raised_NHW1 / np.maximum(value_NHW1, 1e-6)), raised_NHW1)


def saturate(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Change the saturation of HSV. At equal hue and value, distances from the largest color keep proportions."""
    factor, added = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    value_NHW1 = x_NHWC.max(axis=3, keepdims=True)
    lacking_NHWC = value_NHW1 - x_NHWC
    saturation_NHW1 = lacking_NHWC.max(axis=3, keepdims=True) / np.maximum(value_NHW1, 1e-6)
    changed_NHW1 = np.clip(saturation_NHW1 * factor + added, 0, 1)
    red_NHWC = value_NHW1 * (1 - changed_NHW1 * np.array([0, 1, 1], np.float32))  # gray pixels have hue 0, which is red
    ratio_NHW1 = changed_NHW1 / np.maximum(saturation_NHW1, 1e-6)
    return np.where(saturation_NHW1 > 0, value_NHW1 - lacking_NHWC * ratio_NHW1, red_NHWC)


def contrast(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    kept = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean_N11C = x_NHWC.mean(axis=(1, 2), keepdims=True)
    return (x_NHWC - mean_N11C) * kept + mean_N11C


def elastic_transform(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Apply a random affine map, then a smooth random displacement."""
    levels = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    strength, smooth, affine = levels[severity - 1]
    N, height, width, _ = x_NHWC.shape
    length = side(x_NHWC)
    middle, third = length // 2, length // 3
    corners_32 = middle + third * np.array([[1, 1], [1, -1], [-1, -1]], np.float64)
    moved_N32 = corners_32 + draws.uniform(-affine * length, affine * length, (N, 3, 2))
    # The affine map from positions in the result to positions in the image, given by three corners.
    known_N33 = np.concatenate([moved_N32, np.ones((N, 3, 1))], axis=2)
    maps_N32 = np.linalg.solve(known_N33, np.broadcast_to(corners_32, (N, 3, 2)))
    rows_HW, columns_HW = np.mgrid[:height, :width].astype(np.float32)
    places_HW3 = np.stack([rows_HW, columns_HW, np.ones_like(rows_HW)], axis=-1)
    places_NHW2 = np.einsum("hwp,npq->nhwq", places_HW3, maps_N32.astype(np.float32), optimize=True)
    x_NHWC = sampled(x_NHWC, places_NHW2[..., 0], places_NHW2[..., 1], "reflect")
    if not strength:
        return x_NHWC
    shifts_NHW2 = smoothed(draws.uniform(-1, 1, (N, height, width, 2)).astype(np.float32), smooth * length, "reflect")
    shifts_NHW2 *= strength * length
    return sampled(x_NHWC, rows_HW + shifts_NHW2[..., 0], columns_HW + shifts_NHW2[..., 1], "reflect")


def pixelate(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    kept = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    return shrunk(x_NHWC, [int(pixels * kept) for pixels in x_NHWC.shape[1:3]], Image.Resampling.BOX)


def jpeg_compression(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    quality = (80, 65, 58, 50, 40)[severity - 1]

    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return by_pillow(x_NHWC, change)


def rotation(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Rotate by 15 to 75 degrees, to either side. Pixels from outside repeat the border."""
    degrees = 15 * severity * draws.choice([-1, 1], len(x_NHWC))
    cosine_N11, sine_N11 = (of(np.radians(degrees)).astype(np.float32)[:, None, None] for of in (np.cos, np.sin))
    _, height, width, _ = x_NHWC.shape
    rows_HW, columns_HW = np.mgrid[:height, :width].astype(np.float32)
    middle = (height - 1) / 2, (width - 1) / 2
    rows_HW, columns_HW = rows_HW - middle[0], columns_HW - middle[1]
    rows_NHW = cosine_N11 * rows_HW - sine_N11 * columns_HW + middle[0]
    return sampled(x_NHWC, rows_NHW, sine_N11 * rows_HW + cosine_N11 * columns_HW + middle[1], "nearest")


def resolution(x_NHWC: Floats, severity: int, draws: np.random.Generator) -> Floats:
    """Scale down to 28, 24, 20, 16 or 12 of 32 pixels, and back."""
    kept = (28, 24, 20, 16, 12)[severity - 1] / 32
    return shrunk(x_NHWC, [max(1, round(pixels * kept)) for pixels in x_NHWC.shape[1:3]], Image.Resampling.BILINEAR)


def side(x_NHWC: Floats) -> int:
    return min(x_NHWC.shape[1:3])


def smoothed(x_NHWC: Floats, deviation: float, mode: str = "nearest") -> Floats:
    return ndimage.gaussian_filter(x_NHWC, (0, deviation, deviation, 0), mode=mode, truncate=TRUNCATE)


def by_pillow(x_NHWC: Floats, change: Callable[[Image.Image], Image.Image]) -> Floats:
    images_NHWC = np.rint(x_NHWC * 255).astype(np.uint8)
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in images_NHWC]).astype(np.float32) / 255


def shrunk(x_NHWC: Floats, small: list[int], how: Image.Resampling) -> Floats:
    """Scale images down to this many rows and columns, and back."""
    return by_pillow(x_NHWC, lambda image: image.resize((small[1], small[0]), how).resize(image.size, how))


def moved(x_NHWC: Floats, radius: float, deviation: float, angles_N: NDArray[np.float64]) -> Floats:
    """Blur to one side by half a Gaussian, along an angle for each image. The border is repeated."""
    N, height, width, _ = x_NHWC.shape
    scale = side(x_NHWC) / 32
    taps = np.arange(2 * round(radius * scale) + 1)
    weights = np.exp(-0.5 * (taps / (deviation * scale)) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    every_N11 = np.arange(N)[:, None, None]
    out_NHWC = np.zeros_like(x_NHWC)
    for tap, weight in zip(taps, weights, strict=True):
        if weight < 1e-3:
            break
        down_N1, right_N1 = (np.rint(tap * of(angles_N)).astype(np.int64)[:, None] for of in (np.sin, np.cos))
        rows_NH1 = np.clip(np.arange(height) + down_N1, 0, height - 1)[:, :, None]
        columns_N1W = np.clip(np.arange(width) + right_N1, 0, width - 1)[:, None, :]
        out_NHWC += weight * x_NHWC[every_N11, rows_NH1, columns_N1W]
    return out_NHWC / weights[weights >= 1e-3].sum()


def sampled(x_NHWC: Floats, rows_NHW: Floats, columns_NHW: Floats, border: str) -> Floats:
    """Return bilinear values at positions that differ from image to image."""
    N, height, width, colors = x_NHWC.shape
    shape = (N, height, width)
    rows_NHW, columns_NHW = np.broadcast_to(rows_NHW, shape), np.broadcast_to(columns_NHW, shape)
    top_NHW, left_NHW = np.floor(rows_NHW), np.floor(columns_NHW)
    down_NHW1, right_NHW1 = (rows_NHW - top_NHW)[..., None], (columns_NHW - left_NHW)[..., None]
    top_NHW, left_NHW = top_NHW.astype(np.int64), left_NHW.astype(np.int64)
    flat, first_N11 = x_NHWC.reshape(-1, colors), (np.arange(N) * height * width)[:, None, None]

    def at(row_NHW: NDArray[np.int64], column_NHW: NDArray[np.int64]) -> Floats:
        return flat[first_N11 + inside(row_NHW, height, border) * width + inside(column_NHW, width, border)]

    above = at(top_NHW, left_NHW) * (1 - right_NHW1) + at(top_NHW, left_NHW + 1) * right_NHW1
    below = at(top_NHW + 1, left_NHW) * (1 - right_NHW1) + at(top_NHW + 1, left_NHW + 1) * right_NHW1
    return above * (1 - down_NHW1) + below * down_NHW1


def inside(places: NDArray[np.int64], length: int, border: str) -> NDArray[np.int64]:
    """Move positions from outside to the border (nearest), or mirror them at the edge of the last pixel (reflect)."""
    if border == "nearest":
        return np.clip(places, 0, length - 1)
    folded = places % (2 * length)
    return np.minimum(folded, 2 * length - 1 - folded)


def plasma(shape: tuple[int, ...], decay: float, draws: np.random.Generator) -> Floats:
    """Return clouds [N, H, W] in 0..1 by midpoint displacement. Each map is eight tiles wide and high: 64 clouds."""
    N, height, width = shape[:3]
    size = 1 << (8 * max(height, width) - 1).bit_length()
    rows, columns, tiles = size // height, size // width, []
    for _ in range(-(-N // 64)):
        whole = midpoints(size, decay, draws)[: rows * height, : columns * width].reshape(rows, height, columns, width)
        tiles.append(whole.transpose(0, 2, 1, 3).reshape(-1, height, width)[:64])
    return np.concatenate(tiles)[:N]


def midpoints(size: int, decay: float, draws: np.random.Generator) -> Floats:
    """Double a periodic grid in each round by bilinear values, and add noise of smaller and smaller amplitude."""
    grid, amplitude = draws.uniform(-1, 1, (2, 2)).astype(np.float32), 1.0
    while len(grid) < size:
        amplitude /= decay
        for axis in (0, 1):
            between = (grid + np.roll(grid, -1, axis)) / 2
            grid = np.stack([grid, between], axis + 1).reshape(
                [2 * length if place == axis else length for place, length in enumerate(grid.shape)]
            )
        grid += amplitude * draws.uniform(-1, 1, grid.shape).astype(np.float32)
    grid -= grid.min()
    return grid / grid.max()


def applied(matrix: sparse.csr_array, x_NHWC: Floats) -> Floats:
    """Apply a linear map of pixels, the same for every image and color."""
    N, height, width, colors = x_NHWC.shape
    columns = x_NHWC.reshape(N, height * width, colors).transpose(1, 0, 2).reshape(height * width, -1)
    out = (matrix @ columns).reshape(height * width, N, colors)
    return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(x_NHWC.shape)


@lru_cache(maxsize=16)
def zooming(height: int, width: int, severity: int) -> sparse.csr_array:
    """Return the mean of the image and of its middle, enlarged by 1.00, 1.01, 1.02, ..."""
    # The ranges of CIFAR-C with their rounding: the first two include their end, and 1.25 is slightly exceeded.
    zooms = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    enlarged = sum(enlarging(height, width, zoom) for zoom in zooms)
    return ((sparse.eye_array(height * width, dtype=np.float32) + enlarged) / (len(zooms) + 1)).tocsr()


@lru_cache(maxsize=64)
def enlarging(height: int, width: int, zoom: float) -> sparse.csr_array:
    return sparse.kron(stretching(height, zoom), stretching(width, zoom), format="csr").astype(np.float32)


def stretching(length: int, zoom: float) -> sparse.csr_array:
    """Return bilinear values of a line whose middle is enlarged, in whole pixels as in CIFAR-C.

    The middle is rounded up to whole pixels, stretched from its first to its last pixel, and trimmed at both ends. So
    small zooms leave a line unchanged, or move it by part of a pixel.
    """
    middle = int(np.ceil(length / zoom))
    stretched = max(length, round(middle * zoom))
    rows = np.arange(length)
    shown = rows + (stretched - length) // 2
    places = shown * ((middle - 1) / max(1, stretched - 1)) + (length - middle) // 2
    low = np.clip(np.floor(places).astype(int), 0, max(0, length - 2))
    share = places - low
    entries = (
        np.concatenate([1 - share, share]),
        (np.tile(rows, 2), np.concatenate([low, np.minimum(low + 1, length - 1)])),
    )
    return sparse.csr_array(entries, shape=(length, length))


CORRUPTIONS: dict[str, Operator] = {
    of.__name__: of
    for of in (
        gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost, fog,
        brightness, contrast, elastic_transform, pixelate, jpeg_compression,
    )
}  # fmt: skip
EXTRA: dict[str, Operator] = {of.__name__: of for of in (speckle_noise, gaussian_blur, spatter, saturate)}
OPERATORS = {**CORRUPTIONS, **EXTRA, "rotation": rotation, "resolution": resolution}
