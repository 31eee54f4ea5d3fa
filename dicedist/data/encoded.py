"""Images as their files hold them: decoded when they are needed, and only the part that a crop shows.

What is known of every image without decoding it (its size, whether DALI can be trusted with it) was listed once; then
a crop that order.py draws as fractions becomes a box of pixels, and both pipelines decode the same boxes.

Legend: R images listed, B batch, S pixels of a side; a box is (left, top, width, height).
"""

import io
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dicedist.console.lines import printable
from dicedist.data.images import ORIENTATION, as_rgb, refuse_outsized, shrink_and_crop

TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
PLAIN = {("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "L")}  # what DALI decodes as PIL does
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


@dataclass(frozen=True, eq=False)
class Encoded:
    """Takes the place of an array of images in a Split."""

    read: Callable[[int], bytes]  # of a row
    name: Callable[[int], str]  # of a row, for messages
    sizes_R2: NDArray[np.int32]  # width and height, upright
    plain_R: NDArray[np.bool_]  # whether DALI may see the file as it is
    size: int  # S, of the views
    threads: ThreadPoolExecutor

    def index_select(self, dim: int, rows_B: Tensor) -> Tensor:
        """The images as evaluation sees them, uint8 [B, S, S, 3]: like index_select of an array of images."""
        assert dim == 0
        decoded = self.threads.map(lambda row: self.decoded(row, None), rows_B.tolist())
        return torch.from_numpy(np.stack(list(decoded)))

    def __len__(self) -> int:
        return len(self.sizes_R2)

    def decoded(self, row: int, box: Sequence[int] | None) -> NDArray[np.uint8]:
        """The box as it is, or the middle of the image, scaled to S pixels."""
        data = self.read(row)
        try:
            with Image.open(io.BytesIO(data)) as opened:
                image = as_rgb(opened)
                if box is None:
                    return np.asarray(shrink_and_crop(image, self.size))
                left, top, width, height = box
                return np.array(image.crop((left, top, left + width, top + height)))
        except Exception as error:  # a damaged file makes PIL raise anything
            raise ValueError(
                f"{self.name(row)} cannot be decoded ({reason(error)}), though its head could be read: remove it"
            ) from error

    def for_dali(self, row: int) -> NDArray[np.uint8]:
        """The file's bytes; of a kind that DALI decodes otherwise than PIL, the upright image as plain pixels."""
        data = self.read(row)
        if not self.plain_R[row]:
            plain = io.BytesIO()
            with Image.open(io.BytesIO(data)) as opened:
                as_rgb(opened).save(plain, "PPM")
            data = plain.getvalue()
        return np.frombuffer(data, np.uint8)


class Examined(NamedTuple):
    width: int
    height: int
    plain: bool  # whether DALI may see it as it is
    checksum: int  # of all bytes


def examine(data: bytes) -> Examined:
    """What is listed of an image, upright; ValueError with the reason if it is damaged.

    Only the head is decoded, unless the file does not end as its format does: then all of it.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            refuse_outsized(image)
            turn = image.getexif().get(ORIENTATION, 1)
            width, height = image.size[::-1] if turn in TURNED else image.size
            plain = (image.format, image.mode) in PLAIN and turn == 1
            if ENDS.get(image.format or "", b"\0") not in data[-64:]:
                image.load()
    except Exception as error:  # a damaged file makes PIL raise anything
        raise ValueError(reason(error)) from error
    return Examined(width, height, plain, zlib.crc32(data))


def reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__
