"""The embedded data: ten shapes to tell apart amid texture, clutter, occlusion and noise that say nothing of the class.

Every machine makes the same bytes: pixels come from uniform draws of PCG64 by +, -, *, /, sqrt, floor and comparisons,
which IEEE arithmetic defines to the last bit (sin, exp, normal draws and matrix products it does not).

N images, H rows, W columns, 3 colours. A shape is a function of its own coordinates (u, v): the distance to its edge,
negative inside; the paint brush turns distances in pixels into antialiased coverage.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

Array = NDArray[np.float32]

SIZE = 32
COUNTS = {"train": 4000, "test": 2000}
ROOT_1_2, ROOT_3_4 = math.sqrt(0.5), math.sqrt(0.75)
COS_36 = (1 + math.sqrt(5)) / 4
SIN_36 = math.sqrt(1 - COS_36 * COS_36)


def generate(split: str, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [N, 32, 32, 3] and labels [N], each class equally often; the splits are independent draws."""
    rng = Generator(PCG64([seed, list(COUNTS).index(split)]))
    count = COUNTS[split]
    labels_N = np.argsort(rng.random(count), kind="stable") % len(SHAPES)
    base_N3 = _uniform(rng, (count, 3), 0.1, 0.9)
    accent_N3 = _contrasting(rng, base_N3, 0.15, 0.6)
    object_N3 = _contrasting(rng, (base_N3 + accent_N3) / 2, 0.35, 0.8)
    palette_3N3 = np.stack([base_N3, accent_N3, object_N3])

    image_NHW3 = _mix(base_N3, accent_N3, _texture(rng, count))
    for _ in range(3):
        image_NHW3 = _mix(image_NHW3, _pick(rng, palette_3N3), _stroke(rng, count))
    image_NHW3 = _mix(image_NHW3, object_N3, _object(rng, labels_N))
    for _ in range(2):
        image_NHW3 = _mix(image_NHW3, _pick(rng, palette_3N3), _stroke(rng, count))
    image_NHW3 += _noise(rng, count)
    return np.rint(image_NHW3.clip(0, 1) * 255).astype(np.uint8), labels_N


def _disc(u: Array, v: Array) -> Array:
    return _length(u, v) - 1


def _ring(u: Array, v: Array) -> Array:
    return np.abs(_length(u, v) - 0.75) - 0.25


def _pie(u: Array, v: Array) -> Array:
    return np.maximum(_disc(u, v), 0.6 * u - 0.8 * np.abs(v))


def _crescent(u: Array, v: Array) -> Array:
    return np.maximum(_disc(u, v), 0.8 - _length(u - 0.6, v))


def _drop(u: Array, v: Array) -> Array:
    """A disc of radius 0.6 and its tangents from the point (1.2, 0), which is sin(30 degrees) = 0.6 / 1.2 away."""
    u, v = u + 0.3, np.abs(v)
    return np.where(ROOT_3_4 * u > 0.5 * v, 0.5 * u + ROOT_3_4 * v, _length(u, v)) - 0.6


def _heart(u: Array, v: Array) -> Array:
    """A square on its corner, with a half-disc on each of its upper sides."""
    u, v = u + 0.2, np.abs(v)
    along, across = ROOT_1_2 * (u - v), ROOT_1_2 * (u + v)
    square = np.maximum(np.abs(along), np.abs(across))
    return np.minimum(square, _length(along, across - 0.6)) - 0.6


def _triangle(u: Array, v: Array) -> Array:
    return np.maximum(-u, 0.5 * u + ROOT_3_4 * np.abs(v)) - 0.6


def _square(u: Array, v: Array) -> Array:
    return np.maximum(np.abs(u), np.abs(v)) - 0.8


def _star(u: Array, v: Array) -> Array:
    """Five points folded into half a point, of which one straight edge is left."""
    v = np.abs(v)
    for mirror_v in (COS_36, -COS_36):
        beyond = 2 * np.maximum(mirror_v * v - SIN_36 * u, 0)
        u, v = u + beyond * SIN_36, v - beyond * mirror_v
    return 0.4426 * (u - 1) + 0.8967 * np.abs(v)


def _plus(u: Array, v: Array) -> Array:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(u, v) - 1, np.minimum(u, v) - 0.35)


SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": _disc,
    "ring": _ring,
    "pie": _pie,
    "crescent": _crescent,
    "drop": _drop,
    "heart": _heart,
    "triangle": _triangle,
    "square": _square,
    "star": _star,
    "plus": _plus,
}
CLASS_NAMES = tuple(SHAPES)


def _object(rng: Generator, labels_N: NDArray[np.int64]) -> Array:
    """Coverage [N, H, W] of the object; all classes have the same area, so that size tells nothing."""
    count = len(labels_N)
    radius_N = _uniform(rng, count, 5.0, 7.5)
    stretch_N = _uniform(rng, count, 1.0, 1.3)
    u_NHW, v_NHW = _frame(rng, _uniform(rng, (2, count), -6, 6))
    coverage_NHW = np.empty_like(u_NHW)
    for label, shape in enumerate(SHAPES.values()):
        mine = labels_N == label
        scale_N11 = (radius_N[mine] / _area_radius(shape))[:, None, None]
        stretch_N11 = stretch_N[mine][:, None, None]
        distance = shape(u_NHW[mine] / scale_N11 / stretch_N11, v_NHW[mine] / scale_N11 * stretch_N11)
        coverage_NHW[mine] = _cover(distance * scale_N11)
    return coverage_NHW


def _area_radius(shape: Callable[[Array, Array], Array]) -> float:
    """Radius of the disc that has the shape's area."""
    axis = np.linspace(-2, 2, 401, dtype=np.float32)
    inside = np.count_nonzero(shape(axis[None, :], axis[:, None]) < 0)
    return math.sqrt(inside * 0.01**2 / 3.14159265)


def _stroke(rng: Generator, count: int) -> Array:
    """Coverage [N, H, W] of a thin straight bar or open arc: no class looks like it."""
    u_NHW, v_NHW = _frame(rng, _uniform(rng, (2, count), -15, 15))
    length_N11 = _uniform(rng, (count, 1, 1), 2.0, 5.0)
    width_N11 = _uniform(rng, (count, 1, 1), 0.7, 1.4)
    bar = _length(np.maximum(np.abs(u_NHW) - length_N11, 0), v_NHW)
    arc = np.maximum(np.abs(_length(u_NHW, v_NHW) - length_N11), -u_NHW)
    return _cover(np.where(rng.random((count, 1, 1)) < 0.5, bar, arc) - width_N11)


def _texture(rng: Generator, count: int) -> Array:
    """Weights [N, H, W] of the second background colour: a ramp, clouds, stripes, checks or dots."""
    p_NHW, q_NHW = _frame(rng, _uniform(rng, (2, count), -8, 8))
    period_N11 = _uniform(rng, (count, 1, 1), 5, 12)
    a_NHW, b_NHW = _wave(p_NHW / period_N11), _wave(q_NHW / period_N11)
    kinds = [p_NHW / 40 + 0.5, _clouds(rng, count), a_NHW, a_NHW + b_NHW - 2 * a_NHW * b_NHW, a_NHW * b_NHW]
    kind_N = np.floor(rng.random(count) * len(kinds))
    weight_NHW = np.empty_like(p_NHW)
    for index, kind_NHW in enumerate(kinds):
        weight_NHW[kind_N == index] = kind_NHW[kind_N == index]
    return weight_NHW.clip(0, 1)


def _wave(phase: Array) -> Array:
    """0 and 1 in turn, with soft edges, once a period."""
    return (4 * np.abs(phase - np.floor(phase) - 0.5) - 0.5).clip(0, 1)


def _clouds(rng: Generator, count: int) -> Array:
    """A coarse random grid, interpolated linearly."""
    grid = rng.random((count, 6, 6), dtype=np.float32)
    position = np.arange(SIZE, dtype=np.float32) * (5 / SIZE)
    cell = np.floor(position).astype(np.int64)
    part = position - cell.astype(np.float32)
    rows = grid[:, cell] * (1 - part)[:, None] + grid[:, cell + 1] * part[:, None]
    return rows[:, :, cell] * (1 - part) + rows[:, :, cell + 1] * part


def _noise(rng: Generator, count: int) -> Array:
    shape = (count, SIZE, SIZE, 3)
    bell = rng.random(shape, dtype=np.float32) - rng.random(shape, dtype=np.float32)
    return bell * _uniform(rng, (count, 1, 1, 1), 0.05, 0.35)


def _contrasting(rng: Generator, colour_N3: Array, low: float, high: float) -> Array:
    """A colour at a distance between low and high, on the side of the cube that has room."""
    away_N3 = np.where(colour_N3 < 0.5, 1, -1) * _uniform(rng, colour_N3.shape, -0.2, 1)
    distance_N = _uniform(rng, len(colour_N3), low, high)
    norm_N = np.sqrt(away_N3[:, 0] * away_N3[:, 0] + away_N3[:, 1] * away_N3[:, 1] + away_N3[:, 2] * away_N3[:, 2])
    return (colour_N3 + away_N3 * (distance_N / norm_N)[:, None]).clip(0, 1)


def _pick(rng: Generator, palette_PN3: Array) -> Array:
    """One colour of the palette for each image."""
    chosen_N = np.floor(rng.random(palette_PN3.shape[1]) * len(palette_PN3)).astype(np.int64)
    return palette_PN3[chosen_N, np.arange(len(chosen_N))]


def _frame(rng: Generator, centre_2N: Array) -> tuple[Array, Array]:
    """Pixel coordinates [N, H, W] seen from a centre, in a random orientation.

    The angle is drawn through the tangent of its half, which needs no sine; nearly uniform is enough.
    """
    half_N11 = _uniform(rng, (centre_2N.shape[1], 1, 1), -1, 1)
    turn_N11 = np.where(rng.random(half_N11.shape) < 0.5, np.float32(-1), np.float32(1))
    cosine_N11 = turn_N11 * (1 - half_N11 * half_N11) / (1 + half_N11 * half_N11)
    sine_N11 = turn_N11 * 2 * half_N11 / (1 + half_N11 * half_N11)
    pixel = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    x_N1W = pixel - centre_2N[0, :, None, None]
    y_NH1 = pixel[:, None] - centre_2N[1, :, None, None]
    return cosine_N11 * x_N1W + sine_N11 * y_NH1, cosine_N11 * y_NH1 - sine_N11 * x_N1W


def _mix(under: Array, over_N3: Array, weight_NHW: Array) -> Array:
    if under.ndim == 2:
        under = under[:, None, None]
    return under + (over_N3[:, None, None] - under) * weight_NHW[..., None]


def _cover(distance: Array) -> Array:
    return (0.5 - distance).clip(0, 1)


def _length(u: Array, v: Array) -> Array:
    return np.sqrt(u * u + v * v)


def _uniform(rng: Generator, shape: int | tuple[int, ...], low: float, high: float) -> Array:
    return low + (high - low) * rng.random(shape, dtype=np.float32)
