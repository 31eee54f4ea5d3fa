"""Convert a user's inputs (images, arrays, tensors, files) to the form that the ensemble takes.

Legend: N inputs, H rows, W columns, C channels, V values of a vector.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dicedist.console.lines import plural, warn
from dicedist.data.images import fit_array, fit_image
from dicedist.data.sets.folder import decode_file, find_images
from dicedist.data.sets.vectors import read_table
from dicedist.evaluation.about import VECTORS, About

THREADS = 4
LISTED = 5  # files in warnings
Given = TypeVar("Given")
Made = TypeVar("Made")
KINDS = "PIL images, arrays, tensors or paths, one or a list of them"


class Inputs:
    """Iterates over batches of at most batch_size inputs, in the given order.

    An unreadable file in a folder is left out with a warning. An unreadable file that the caller named raises a
    ValueError, so that answers have the order of the caller's list. After the last batch, `paths` lists the files that
    were read, if all inputs were files, and `left_out` has the reasons for the others.
    """

    def __init__(self, images: Any, about: About, batch_size: int):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: write a whole number from 1")
        self.images, self.about, self.batch_size = images, about, batch_size
        self.paths: list[str] | None = None
        self.left_out: dict[str, str] = {}

    def __iter__(self) -> Iterator[Tensor]:
        images, about = self.images, self.about
        if about.images == VECTORS:
            yield from read_vectors(images, about).split(self.batch_size)
        elif isinstance(images, (np.ndarray, Tensor)):
            yield from (prepare(chunk, about) for chunk in to_NHWC(images, about).split(self.batch_size))
        else:
            yield from self.from_items(as_list(images), of_folder=is_path(images) and Path(images).is_dir())

    def from_items(self, items: Sequence[Any], of_folder: bool) -> Iterator[Tensor]:
        make = partial(decode_or_reason if of_folder else to_batch, about=self.about)
        remaining, read = iter(items), []
        for made in prefetch(items, self.batch_size, make):
            rows = []
            for item, image in zip(islice(remaining, len(made)), made, strict=True):
                if isinstance(image, str):
                    self.left_out[str(item)] = image
                else:
                    rows.append(image)
                    read.append(item)
            if rows:
                yield torch.cat(rows)
        self.warn_left_out(read)
        self.paths = [str(item) for item in read] if all(map(is_path, read)) else None

    def warn_left_out(self, read: Sequence[Any]) -> None:
        reasons = [f"{path}: {reason}" for path, reason in self.left_out.items()]
        if not read:
            raise ValueError(f"{self.images}: no image could be read: {reasons[0]}")
        for line in reasons[:LISTED]:
            warn(f"left out {line}")
        if len(reasons) > LISTED:
            warn(f"left out {plural(len(reasons) - LISTED, 'more image')}, which the answer names")


def is_path(item: Any) -> bool:
    return isinstance(item, (str, os.PathLike))


def read_vectors(given: Any, about: About) -> Tensor:
    """Return float32 [N, V] from an array, a tensor, or a file of vectors, whose labels are ignored."""
    if is_path(given):
        given = read_table(Path(given), columns=about.columns).vectors_NV
    if not isinstance(given, (np.ndarray, Tensor)):
        raise ValueError(f"vectors are a {type(given).__name__}: give an array or tensor [N, V], or the path of a file")
    values = (given if isinstance(given, Tensor) else torch.from_numpy(given)).float()
    refuse_unfit_vectors(values, about)
    return values


def refuse_unfit(images: Tensor, about: About) -> None:
    """Raise a ValueError for images of another type, size or range, for which answers would be wrong."""
    if not isinstance(images, Tensor):
        raise ValueError(f"images are a {type(images).__name__}: give a torch tensor (torch.from_numpy of an array)")
    if about.images == VECTORS:
        refuse_unfit_vectors(images, about)
        return
    (C, size, _), is_uint8 = about.input_shape, about.images == "uint8"
    layout = f"uint8 [N, H, W, {C}]" if is_uint8 else f"float [N, {C}, H, W]"
    shape = (size, size, C) if is_uint8 else about.input_shape
    fits = images.dtype == torch.uint8 if is_uint8 else images.is_floating_point()
    if not fits or images.ndim != 4 or tuple(images.shape[1:]) != shape:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}, and this ensemble takes {layout} with "
            f"{size} x {size} pixels: convert them as training did ({about.preparation})"
        )
    if images.numel():
        refuse_range(images, "images in 0..1, which the ensemble normalizes")


def refuse_range(images: Tensor, instead: str) -> None:
    low, high = images.amin().item(), images.amax().item()
    if images.is_floating_point() and not (0 <= low and high <= 1):
        raise ValueError(f"pixels lie in {low:.3g}..{high:.3g}: give {instead}")
    if images.dtype == torch.uint8 and high <= 1:
        raise ValueError(f"the brightest pixel is {high:.0f} of 255: were images in 0..1 turned into uint8?")


def refuse_unfit_vectors(vectors: Tensor, about: About) -> None:
    """Raise a ValueError for vectors of another width or type, and for values that are not finite."""
    width = len(about.mean)
    if not isinstance(vectors, Tensor) or not vectors.is_floating_point() or vectors.shape[1:] != (width,):
        found = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"vectors are {found}, and this ensemble takes float [N, {width}]")
    if not vectors.isfinite().all():
        raise ValueError("a value is not a finite number: fill it, or leave its vector out")


def as_list(images: Any) -> list[Any]:
    """Return a list of images: of one image, of the images in a folder, or as given."""
    if is_path(images) and Path(images).is_dir():
        found = list(find_images(Path(images)))
        if not found:
            raise ValueError(f"{images}: no images found")
        return found
    if is_path(images) or isinstance(images, Image.Image):
        return [images]
    try:
        items = list(images)
    except TypeError as error:
        raise ValueError(f"images are a {type(images).__name__}: give {KINDS}") from error
    if not items:
        raise ValueError(f"there is no image in the list: give {KINDS}")
    return items


def decode_or_reason(path: Path, about: About) -> Tensor | str:
    """Return the image of a file, as a batch of one, or the reason why it cannot be decoded."""
    decoded = decode_file(path, about.size, channels=about.input_shape[0])
    return decoded if isinstance(decoded, str) else to_layout(torch.from_numpy(decoded)[None], about)


def to_batch(item: Any, about: About) -> Tensor:
    """Return one image as a batch of one."""
    if is_path(item):
        image = decode_or_reason(Path(item), about)
        if isinstance(image, str):
            raise ValueError(f"{item}: {image}")
        return image
    if isinstance(item, Image.Image):
        return to_layout(torch.from_numpy(fit_image(item, about.size, about.input_shape[0]))[None], about)
    if isinstance(item, (np.ndarray, Tensor)):
        given = to_NHWC(item, about)
        if len(given) > 1:
            raise ValueError(f"an item of the list has shape {list(item.shape)}: give one image each, or one array")
        return prepare(given, about)
    raise ValueError(f"an item of the list is a {type(item).__name__}: give {KINDS}")


def to_NHWC(array: NDArray[Any] | Tensor, about: About) -> Tensor:
    """Return [N, H, W, C] of a batch or of one image; channels may stand last or, as torch has it, before the rows.

    Gray images may come without channels, as [N, H, W] or [H, W].
    """
    C = about.input_shape[0]
    if not isinstance(array, Tensor) and array.dtype.kind not in "biuf":
        raise ValueError(f"images are an array of {array.dtype}: give uint8 in 0..255 or floats in 0..1")
    values = array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if C == 1 and (values.ndim == 2 or values.ndim == 3 and 1 not in (values.shape[0], values.shape[2])):
        values = values[..., None]
    if values.ndim == 3:
        values = values[None]
    shape = tuple(values.shape)
    last, first = values.ndim == 4 and shape[3] == C, values.ndim == 4 and shape[1] == C
    if not (last or first) or not values.numel():
        raise ValueError(
            f"images have shape {list(array.shape)}: give [N, H, W, {C}] or [N, {C}, H, W], or one of them"
        )
    if values.dtype != torch.uint8 and not values.is_floating_point():
        raise ValueError(f"images are {values.dtype}: give uint8 in 0..255 or floats in 0..1")
    # If both fit (3 x 3 pixels), assume the usual layout: channels last for bytes, channels first for floats.
    return values if last and not (first and values.is_floating_point()) else values.permute(0, 2, 3, 1)


def prepare(images_NHWC: Tensor, about: About) -> Tensor:
    """Check the range of images, and convert them to the ensemble's size and type."""
    refuse_range(images_NHWC, "floats in 0..1, or uint8 in 0..255")
    is_float = images_NHWC.is_floating_point()
    at_size = images_NHWC.shape[1:3] == (about.size, about.size)
    if is_float and about.images == "float" and at_size:
        return images_NHWC.permute(0, 3, 1, 2).float()
    if is_float:
        images_NHWC = (images_NHWC * 255).round().to(torch.uint8)
    if not at_size:
        arrays = images_NHWC.cpu().numpy()
        images_NHWC = torch.stack([torch.from_numpy(fit_array(image_HWC, about.size)) for image_HWC in arrays])
    return to_layout(images_NHWC, about)


def to_layout(images_NHWC: Tensor, about: About) -> Tensor:
    """Return uint8 images of the right size in the type and layout that the ensemble takes."""
    return images_NHWC if about.images == "uint8" else images_NHWC.permute(0, 3, 1, 2) / 255


def prefetch(items: Sequence[Given], batch_size: int, make: Callable[[Given], Made]) -> Iterator[list[Made]]:
    """Yield one list per batch, in the order of the items. Only one batch is prepared ahead, to save memory."""
    chunks = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    with ThreadPoolExecutor(THREADS) as threads:
        waiting = (threads.map(make, chunk) for chunk in chunks)
        begun = list(islice(waiting, 1))
        for _ in chunks:
            begun += islice(waiting, 1)
            yield list(begun.pop(0))
