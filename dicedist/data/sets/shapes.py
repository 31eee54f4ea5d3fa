"""Generated images: ten light shapes with texture, clutter, occlusion and noise that do not depend on the class.

Every machine makes the same bytes: pixels are computed from uniform draws of PCG64 with +, -, *, /, sqrt, floor and
comparisons, which IEEE arithmetic defines to the last bit (unlike sin, exp, normal draws and matrix products).

Legend: N images, C colors, H rows, W columns; a dimension of size 1 is written 1, as in weight_N1HW.
A shape is a function of coordinates (u, v): the distance to its edge, negative inside. Every shape is symmetric, so a
flip does not change the class.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from dicedist.config.schema import DataConfig
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.reading import SPLITS

Array = NDArray[np.floating]  # float32 at run time
Shape = Callable[[Array, Array], Array]

SIZE = 32
COUNTS = {"train": 4000, "test": 2000}
MEAN = (0.337, 0.335, 0.335)
STD = (0.196, 0.195, 0.195)
BLOCK = 200  # images per block, so that their arrays fit into the cache

ROOT_1_2, ROOT_3_4 = math.sqrt(0.5), math.sqrt(0.75)
COS_36 = (1 + math.sqrt(5)) / 4
SIN_36 = math.sqrt(1 - COS_36 * COS_36)


def generate(split: str, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images and labels, with every class equally often. "train" and "test" are independent draws."""
    rng = Generator(PCG64([seed, list(COUNTS).index(split)]))
    labels_N = np.argsort(rng.random(COUNTS[split]), kind="stable") % len(SHAPES)
    images_NHWC = np.empty((len(labels_N), SIZE, SIZE, 3), np.uint8)
    for start in range(0, len(labels_N), BLOCK):
        block = slice(start, start + BLOCK)
        images_NHWC[block] = _draw(rng, labels_N[block]).transpose(0, 2, 3, 1)
    return images_NHWC, labels_N


def _draw(rng: Generator, labels_N: NDArray[np.int64]) -> NDArray[np.uint8]:
    count = len(labels_N)
    ground_NC11 = _uniform(rng, (count, 3, 1, 1), 0.05, 0.45)
    accent_NC11 = _lighter(rng, ground_NC11, 0.05, 0.3)
    object_NC11 = _lighter(rng, accent_NC11, 0.4, 0.8)
    colors = (ground_NC11, accent_NC11, object_NC11)

    image_NCHW = _paint(ground_NC11, accent_NC11, _texture(rng, count))
    image_NCHW = _paint(image_NCHW, _any_of(rng, colors), _stroke(rng, count))
    image_NCHW = _paint(image_NCHW, object_NC11, _object(rng, labels_N))
    image_NCHW = _paint(image_NCHW, _any_of(rng, colors), _stroke(rng, count))
    image_NCHW += _noise(rng, count)
    return np.rint(image_NCHW.clip(0, 1) * 255).astype(np.uint8)


def _drop(u: Array, v: Array) -> Array:
    """A disc of radius 0.6 and its two tangents through a point 1.2 away, which meet at 60 degrees."""
    u, v = u + 0.3, np.abs(v)
    return np.where(ROOT_3_4 * u > 0.5 * v, 0.5 * u + ROOT_3_4 * v, _length(u, v)) - 0.6


def _heart(u: Array, v: Array) -> Array:
    """A square on its corner, with a half-disc on each of its upper sides."""
    u, v = u + 0.2, np.abs(v)
    along, across = ROOT_1_2 * (u - v), ROOT_1_2 * (u + v)
    square = np.maximum(np.abs(along), np.abs(across))
    return np.minimum(square, _length(along, across - 0.6)) - 0.6


def _star(u: Array, v: Array) -> Array:
    """A star. Folded along its axes it is half a point: an edge from (1, 0), the tip, to 0.5 (cos 36, sin 36)."""
    v = np.abs(v)
    for mirror_v in (COS_36, -COS_36):
        beyond = 2 * np.maximum(mirror_v * v - SIN_36 * u, 0)
        u, v = u + beyond * SIN_36, v - beyond * mirror_v
    return 0.4426 * (u - 1) + 0.8967 * np.abs(v)


def _plus(u: Array, v: Array) -> Array:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(u, v) - 1, np.minimum(u, v) - 0.35)


SHAPES: dict[str, Shape] = {
    "disc": lambda u, v: _length(u, v) - 1,
    "ring": lambda u, v: np.abs(_length(u, v) - 0.75) - 0.25,
    "pie": lambda u, v: np.maximum(_length(u, v) - 1, 0.6 * u - 0.8 * np.abs(v)),
    "crescent": lambda u, v: np.maximum(_length(u, v) - 1, 0.8 - _length(u - 0.6, v)),
    "drop": _drop,
    "heart": _heart,
    "triangle": lambda u, v: np.maximum(-u, 0.5 * u + ROOT_3_4 * np.abs(v)) - 0.6,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.8,
    "star": _star,
    "plus": _plus,
}
CLASS_NAMES = tuple(SHAPES)


def _object(rng: Generator, labels_N: NDArray[np.int64]) -> Array:
    """Return the coverage [N, 1, H, W] of the object. All classes have the same distribution of areas."""
    count = len(labels_N)
    u_N1HW, v_N1HW = _frame(rng, count, 4)
    radius_N111 = _uniform(rng, (count, 1, 1, 1), 4, 6)
    stretch_N111 = _uniform(rng, (count, 1, 1, 1), 1, 1.2)
    coverage_N1HW = np.empty_like(u_N1HW)
    for label, shape in enumerate(SHAPES.values()):
        of_class = labels_N == label
        scale, stretch = radius_N111[of_class] / _radius(shape), stretch_N111[of_class]
        distance = shape(u_N1HW[of_class] / (scale * stretch), v_N1HW[of_class] / (scale / stretch))
        coverage_N1HW[of_class] = _cover(distance * scale)
    return coverage_N1HW


@cache
def _radius(shape: Shape) -> float:
    """Return the radius of the disc that has the shape's area."""
    axis = np.linspace(-2, 2, 401, dtype=np.float32)
    inside = np.count_nonzero(shape(axis, axis[:, None]) < 0)
    return math.sqrt(inside * 0.01 * 0.01 / math.pi)


def _stroke(rng: Generator, count: int) -> Array:
    """Return the coverage [N, 1, H, W] of a thin bar or an open arc at a random place. No class looks like them."""
    u_N1HW, v_N1HW = _frame(rng, count, 16)
    reach_N111 = _uniform(rng, (count, 1, 1, 1), 2, 5)
    width_N111 = _uniform(rng, (count, 1, 1, 1), 0.7, 1.4)
    bar_N1HW = _length(np.maximum(np.abs(u_N1HW) - reach_N111, 0), v_N1HW)
    arc_N1HW = np.maximum(np.abs(_length(u_N1HW, v_N1HW) - reach_N111), -u_N1HW)
    return _cover(_any_of(rng, (bar_N1HW, arc_N1HW)) - width_N111)


def _texture(rng: Generator, count: int) -> Array:
    """Return the weight [N, 1, H, W] of the accent over the ground color: a ramp, clouds, stripes, checks or dots."""
    u_N1HW, v_N1HW = _frame(rng, count, 16)
    period_N111 = _uniform(rng, (count, 1, 1, 1), 5, 12)
    stripes, across = _wave(u_N1HW / period_N111), _wave(v_N1HW / period_N111)
    ramp = (u_N1HW / SIZE + 0.5).clip(0, 1)
    return _any_of(rng, (ramp, _clouds(rng, count), stripes, np.abs(stripes - across), stripes * across))


def _wave(phase: Array) -> Array:
    """Alternate between 1 and 0 once per period, with soft edges."""
    return (4 * np.abs(phase - np.floor(phase) - 0.5) - 0.5).clip(0, 1)


def _clouds(rng: Generator, count: int) -> Array:
    """Interpolate a coarse grid of random values linearly."""
    grid = rng.random((count, 1, 6, 6), dtype=np.float32)
    position = np.arange(SIZE, dtype=np.float32) * (5 / SIZE)
    cell = np.floor(position).astype(np.int64)
    part = position - np.floor(position)
    rows = grid[:, :, cell] * (1 - part)[:, None] + grid[:, :, cell + 1] * part[:, None]
    return rows[..., cell] * (1 - part) + rows[..., cell + 1] * part


def _noise(rng: Generator, count: int) -> Array:
    triangular_NCHW = _uniform(rng, (count, 3, SIZE, SIZE), -1, 1) + _uniform(rng, (count, 3, SIZE, SIZE), -1, 1)
    return triangular_NCHW * _uniform(rng, (count, 1, 1, 1), 0.02, 0.2)


def _frame(rng: Generator, count: int, shift: float) -> tuple[Array, Array]:
    """Return pixel coordinates [N, 1, H, W] in a frame of any orientation, within `shift` of the image's middle."""
    half_N111 = _uniform(rng, (count, 1, 1, 1), -1, 1)  # the tangent of half the angle, so that no sine is needed
    turn_N111 = np.where(rng.random((count, 1, 1, 1)) < 0.5, np.float32(-1), np.float32(1))
    cosine_N111 = turn_N111 * (1 - half_N111 * half_N111) / (1 + half_N111 * half_N111)
    sine_N111 = turn_N111 * 2 * half_N111 / (1 + half_N111 * half_N111)
    pixel = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    x_N11W = pixel - _uniform(rng, (count, 1, 1, 1), -shift, shift)
    y_N1H1 = pixel[:, None] - _uniform(rng, (count, 1, 1, 1), -shift, shift)
    return cosine_N111 * x_N11W + sine_N111 * y_N1H1, cosine_N111 * y_N1H1 - sine_N111 * x_N11W


def _any_of(rng: Generator, choices: tuple[Array, ...]) -> Array:
    """Pick one of the choices at random for each image."""
    chosen_N = np.floor(rng.random(len(choices[0])) * len(choices))
    result = np.empty_like(choices[0])
    for index, choice in enumerate(choices):
        result[chosen_N == index] = choice[chosen_N == index]
    return result


def _lighter(rng: Generator, color_NC11: Array, low: float, high: float) -> Array:
    rise_N111 = _uniform(rng, (len(color_NC11), 1, 1, 1), low, high)
    return color_NC11 + rise_N111 * _uniform(rng, color_NC11.shape, 0.2, 1)


def _paint(under: Array, color_NC11: Array, weight_N1HW: Array) -> Array:
    return under + (color_NC11 - under) * weight_N1HW


def _cover(distance: Array) -> Array:
    """Return the share of each pixel inside a shape (antialiasing), from the distance to its edge in pixels."""
    return (0.5 - distance).clip(0, 1)


def _length(u: Array, v: Array) -> Array:
    return np.sqrt(u * u + v * v)


def _uniform(rng: Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    return low + (high - low) * rng.random(shape, dtype=np.float32)


def prepare_shapes(config: DataConfig, root: Path) -> Prepared:
    """Draw the images: they depend neither on the config nor on a folder."""

    def build(new_array: NewArray) -> dict[str, Any]:
        for split in SPLITS:
            images_NHWC, labels_N = generate(split)
            new_array(f"{split}_images", images_NHWC.shape, np.uint8)[:] = images_NHWC
            new_array(f"{split}_labels", labels_N.shape, np.int64)[:] = labels_N
        return {"class_names": CLASS_NAMES, "mean": MEAN, "std": STD}

    code = Path(__file__)
    return prepare("shapes", code.parent, [code], build)


SETS = {"shapes": prepare_shapes}
