"""What a user gives to be predicted (images, arrays, tensors, files), brought to what the ensemble takes.

Legend: N inputs, H rows, W columns, C colours, V values of a vector.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dicedist.console.lines import warn
from dicedist.data.images import as_rgb, shrink_and_crop
from dicedist.data.sets.folder import decode_file, find_images
from dicedist.data.sets.vectors import read_table
from dicedist.evaluation.about import VECTORS, About

THREADS = 4
Given = TypeVar("Given")
Made = TypeVar("Made")
KINDS = "PIL images, arrays, tensors or paths, one or a list of them"


class Ready(NamedTuple):
    """A batch as the ensemble takes it, and the names of those of its inputs that came from files."""

    inputs: Tensor
    paths: list[str]


def batches(images: Any, about: About, batch_size: int) -> Iterator[Ready]:
    """At most batch_size inputs each, in the order given.

    A file that cannot be decoded is refused if it was named itself, and left out with a warning if it lies in a folder
    that was named.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: write a whole number from 1")
    if about.images == VECTORS:
        yield from (Ready(chunk, []) for chunk in vectors(images, about).split(batch_size))
    elif isinstance(images, (np.ndarray, Tensor)):
        yield from (Ready(fitted(chunk, about), []) for chunk in as_tensor(images).split(batch_size))
    else:
        yield from of_items(listed(images), about, batch_size, tolerant=is_folder(images))


def of_items(items: Sequence[Any], about: About, batch_size: int, tolerant: bool) -> Iterator[Ready]:
    remaining, found = iter(items), 0
    for made in ahead(items, batch_size, lambda item: one(item, about)):
        read = []
        for item, image in zip(islice(remaining, len(made)), made, strict=True):
            if isinstance(image, Tensor):
                read.append((item, image))
            elif tolerant:
                warn(f"left out {item}: {image}")
            else:
                raise ValueError(f"{item}: {image}")
        if read:
            found += len(read)
            paths = [str(item) for item, _ in read if isinstance(item, (str, os.PathLike))]
            yield Ready(torch.cat([image for _, image in read]), paths)
    if not found:
        raise ValueError("none of the images in the folder can be decoded")


def vectors(given: Any, about: About) -> Tensor:
    """float32 [N, V] of an array, a tensor, or a file of vectors, whose labels count for nothing."""
    if isinstance(given, (str, os.PathLike)):
        given = read_table(Path(given)).vectors_NV
    if not isinstance(given, (np.ndarray, Tensor)):
        raise ValueError(f"vectors are a {type(given).__name__}: give an array or tensor [N, V], or the path of a file")
    values = (given if isinstance(given, Tensor) else torch.from_numpy(given)).float()
    refuse_unfit_vectors(values, about)
    return values


def refuse_unfit_vectors(vectors: Tensor, about: About) -> None:
    """Vectors of another width or type would not be answered, and NaN would be answered by NaN."""
    width = len(about.mean)
    if not isinstance(vectors, Tensor) or not vectors.is_floating_point() or vectors.shape[1:] != (width,):
        found = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"vectors are {found}, and this ensemble takes float [N, {width}]")
    if not vectors.isfinite().all():
        raise ValueError("a value is not a finite number: fill it, or leave its vector out")


def listed(images: Any) -> list[Any]:
    """One image is a list of one; a folder is the list of its images."""
    if is_folder(images):
        found = list(find_images(Path(images)))
        if not found:
            raise ValueError(f"{images}: no images found")
        return found
    if isinstance(images, (str, os.PathLike, Image.Image)):
        return [images]
    try:
        items = list(images)
    except TypeError as error:
        raise ValueError(f"images are a {type(images).__name__}: give {KINDS}") from error
    if not items:
        raise ValueError(f"there is no image in the list: give {KINDS}")
    return items


def is_folder(images: Any) -> bool:
    return isinstance(images, (str, os.PathLike)) and Path(images).is_dir()


def one(item: Any, about: About) -> Tensor | str:
    """One image, as a batch of one; of a file that cannot be decoded, the reason."""
    if isinstance(item, (str, os.PathLike)):
        decoded = decode_file(Path(item), about.size)
        return decoded if isinstance(decoded, str) else taken(torch.from_numpy(np.array(decoded))[None], about)
    if isinstance(item, Image.Image):
        return taken(scaled(item, about.size)[None], about)
    if isinstance(item, (np.ndarray, Tensor)):
        given = as_tensor(item)
        if len(given) > 1:
            raise ValueError(f"an item of the list has shape {list(item.shape)}: give one image each, or one array")
        return fitted(given, about)
    raise ValueError(f"an item of the list is a {type(item).__name__}: give {KINDS}")


def as_tensor(array: NDArray[Any] | Tensor) -> Tensor:
    """[N, H, W, 3] of a batch or of one image; channels may stand last or, as torch has it, before the rows."""
    values = array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if values.ndim == 3:
        values = values[None]
    shape = tuple(values.shape)
    last, first = values.ndim == 4 and shape[3] == 3, values.ndim == 4 and shape[1] == 3
    if not (last or first) or not values.numel():
        raise ValueError(f"images have shape {list(array.shape)}: give [N, H, W, 3] or [N, 3, H, W], or one of them")
    if values.dtype != torch.uint8 and not values.is_floating_point():
        raise ValueError(f"images are {values.dtype}: give uint8 in 0..255 or floats in 0..1")
    # Where both fit (3 x 3 pixels), bytes are taken as images and floats as tensors usually are.
    return values if last and not (first and values.is_floating_point()) else values.permute(0, 2, 3, 1)


def fitted(images_NHWC: Tensor, about: About) -> Tensor:
    """Checked for their range, brought to the ensemble's size and type."""
    is_float = images_NHWC.is_floating_point()
    low, high = images_NHWC.amin().item(), images_NHWC.amax().item()
    if is_float and not (0 <= low and high <= 1):
        raise ValueError(f"pixels lie in {low:.3g}..{high:.3g}: give floats in 0..1, or uint8 in 0..255")
    if not is_float and high <= 1:
        raise ValueError(f"the brightest pixel is {high:.0f} of 255: were images in 0..1 turned into uint8?")
    at_size = images_NHWC.shape[1:3] == (about.size, about.size)
    if is_float and about.images == "float" and at_size:
        return images_NHWC.permute(0, 3, 1, 2).float()
    if is_float:
        images_NHWC = (images_NHWC * 255).round().to(torch.uint8)
    if not at_size:
        arrays = (image.cpu().numpy() for image in images_NHWC)
        images_NHWC = torch.stack([scaled(Image.fromarray(array), about.size) for array in arrays])
    return taken(images_NHWC, about)


def scaled(image: Image.Image, size: int) -> Tensor:
    return torch.from_numpy(np.array(shrink_and_crop(as_rgb(image), size)))


def taken(images_NHWC: Tensor, about: About) -> Tensor:
    """uint8 images of the right size, in the type and layout that the ensemble takes."""
    return images_NHWC if about.images == "uint8" else images_NHWC.permute(0, 3, 1, 2) / 255


def ahead(items: Sequence[Given], batch_size: int, make: Callable[[Given], Made]) -> Iterator[list[Made]]:
    """One list per batch, in the order of the items. Only the next batch is made ahead, so memory stays small."""
    chunks = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    with ThreadPoolExecutor(THREADS) as threads:
        waiting = (threads.map(make, chunk) for chunk in chunks)
        begun = list(islice(waiting, 1))
        for _ in chunks:
            begun += islice(waiting, 1)
            yield list(begun.pop(0))
