"""Encoded images: listed once, and decoded when they are needed. Only the box of the crop is decoded.

The list has the facts that need no decoding: the size of every image, its length and checksum, and whether DALI decodes
it correctly. The list is cached like prepared images.

Legend: R images listed, B batch, S pixels of a side; a box is (left, top, width, height).
"""

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dicedist.config.schema import DataConfig
from dicedist.data.images import ORIENTATION, decode_file, moments, open_image, shrink_and_crop, upright
from dicedist.data.prepared import NewArray, Prepared
from dicedist.data.reading import MEASURED, reason, shown

TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
PLAIN = {("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "L")}  # formats that DALI decodes as PIL does
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


class Files(NamedTuple):
    """The encoded images of one split, by row."""

    name: Callable[[int], str]  # relative to the folder, for messages
    read: Callable[[int], bytes]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded images in place of an array of images in a Split."""

    folder: Path
    files: Files
    sizes_R2: NDArray[np.int32]  # width and height of the upright image
    plain_R: NDArray[np.bool_]  # may DALI read the file as it is?
    bytes_R: NDArray[np.int64]
    checksums_R: NDArray[np.uint32]  # of the whole files
    size: int  # S, the side of the views
    channels: int
    threads: ThreadPoolExecutor

    def index_select(self, dim: int, rows_B: Tensor) -> Tensor:
        """Return the images for evaluation, uint8 [B, S, S, C], like index_select of an array of images."""
        assert dim == 0
        decoded = self.threads.map(lambda row: self.decoded(row, None), rows_B.tolist())
        return torch.from_numpy(np.stack(list(decoded)))

    def __len__(self) -> int:
        return len(self.sizes_R2)

    def name(self, row: int) -> str:
        return str(self.folder / self.files.name(row))

    def read(self, row: int) -> bytes:
        """Read a file. Refuse it if its length has changed since it was listed."""
        name, listed = self.name(row), self.bytes_R[row]
        try:
            data = self.files.read(row)
        except OSError as error:
            raise ValueError(f"{name} was listed at the start and cannot be read: {error.strerror}") from error
        if len(data) != listed:
            raise ValueError(f"{name} had {listed:,} bytes at the start, and now has {len(data):,}")
        return data

    def decoded(self, row: int, box: Sequence[int] | None) -> NDArray[np.uint8]:
        """Return the box in its own size; without a box, the middle of the image, scaled to S pixels."""

        def cut(image: Image.Image, size: int) -> Image.Image:
            if box is None:
                return shrink_and_crop(image, size)
            left, top, width, height = box
            return image.crop((left, top, left + width, top + height))

        image = decode_file(io.BytesIO(self.read(row)), self.size, cut, self.channels)
        if isinstance(image, str):
            raise ValueError(f"{self.name(row)} cannot be decoded ({image}), though its head could be read: remove it")
        return image

    def for_dali(self, row: int) -> NDArray[np.uint8]:
        """Return the bytes of a file, or the upright pixels if DALI decodes its format differently from PIL."""
        data = self.read(row)
        if not self.plain_R[row]:
            plain = io.BytesIO()
            with Image.open(io.BytesIO(data)) as opened:
                upright(opened, self.channels).save(plain, "PPM")
            data = plain.getvalue()
        return np.frombuffer(data, np.uint8)


def open_listed(prepared: Prepared, split: str, config: DataConfig, folder: Path, files: Files) -> Encoded:
    columns = ("sizes", "plain", "bytes", "checksums")
    sizes_R2, plain_R, bytes_R, checksums_R = (prepared.array(f"{split}_{of}") for of in columns)
    threads = ThreadPoolExecutor(config.num_threads)
    return Encoded(folder, files, sizes_R2, plain_R, bytes_R, checksums_R, config.size, config.channels, threads)


Listing = tuple[Sequence[int], Sequence[int], Files]  # labels, numbers of bytes, and the files themselves


def index(
    listings: Mapping[str, Listing], class_names: Sequence[str], config: DataConfig, new_array: NewArray
) -> dict[str, Any]:
    """Fill the arrays that every source of encoded images has, and return the contents of about.json."""
    about: dict[str, Any] = {"class_names": list(class_names), "corrupt": {}}
    for split, (labels, num_bytes, files) in listings.items():
        number = len(labels)
        sizes_R2 = new_array(f"{split}_sizes", (number, 2), np.int32)
        plain_R = new_array(f"{split}_plain", (number,), np.bool_)
        checksums_R = new_array(f"{split}_checksums", (number,), np.uint32)
        new_array(f"{split}_labels", (number,), np.int64)[:] = labels
        new_array(f"{split}_bytes", (number,), np.int64)[:] = num_bytes
        corrupt: dict[int, str] = {}
        with ThreadPoolExecutor(config.num_threads) as threads:
            every = threads.map(partial(examined, files), range(number))
            for row, found in enumerate(shown(every, number, f"images of {split} listed")):
                if isinstance(found, str):
                    corrupt[row], found = found, ((1, 1), False, 0)
                sizes_R2[row], plain_R[row], checksums_R[row] = found
            if split == "train":
                # Damage in the middle of a file is found only here, when the image is decoded.
                good = [row for row in range(number) if row not in corrupt]
                chosen = good[:: max(1, -(-len(good) // MEASURED))]
                decode = partial(decode_file, size=config.size, channels=config.channels)
                decoded = threads.map(lambda row: decode(io.BytesIO(files.read(row))), chosen)  # noqa: B023
                views = dict(zip(chosen, decoded, strict=True))
                corrupt |= {row: view for row, view in views.items() if isinstance(view, str)}
                about["mean"], about["std"] = moments(view for view in views.values() if not isinstance(view, str))
        about["corrupt"][split] = [(row, files.name(row), why) for row, why in sorted(corrupt.items())]
    return about


def examined(files: Files, row: int) -> tuple[tuple[int, int], bool, int] | str:
    """Return size, plainness and checksum of an upright image, or the reason why it cannot be decoded.

    Only the head is decoded. If the file does not end as its format requires, the whole image is decoded.
    """
    try:
        data = files.read(row)
        with open_image(io.BytesIO(data)) as image:
            turn = image.getexif().get(ORIENTATION, 1)
            width, height = image.size[::-1] if turn in TURNED else image.size
            plain = (image.format, image.mode) in PLAIN and turn == 1
            if ENDS.get(image.format or "", b"\0") not in data[-64:]:
                image.load()
        return (width, height), plain, zlib.crc32(data)
    except Exception as error:  # a damaged file makes PIL raise anything
        return reason(error)
