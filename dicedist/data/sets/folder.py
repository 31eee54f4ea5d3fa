"""A user's own images in root/train/<class>/ and root/test/<class>/: found, decoded once, resized to one size."""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dicedist.config.schema import DataConfig
from dicedist.console.lines import plural, printable
from dicedist.console.progress import Progress
from dicedist.data import uses_dali
from dicedist.data.images import as_rgb, refuse_outsized, shrink_and_crop
from dicedist.data.prepared import NewArray, Prepared, prepare

log = logging.getLogger(__name__)

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LAYOUT = "data=folder needs train/<class>/*.jpg and test/<class>/*.jpg in data.root"
DECODED_AT_ONCE = 16  # files; a photograph takes 36 MB before it is resized
LISTED = 20  # corrupt files named in the log

Fit = Callable[[Image.Image, int], Image.Image]  # fits an image to a square of that size


class Listing(NamedTuple):
    class_names: list[str]
    files: list[Path]
    labels: list[int]


class Corrupt(NamedTuple):
    row: int
    file: str
    reason: str


def prepare_folder(config: DataConfig, root: Path) -> Prepared:
    listings = {split: scan(root / split) for split in ("train", "test")}
    require_same_classes(root, listings["train"].class_names, listings["test"].class_names)
    decoder = "dali" if uses_dali(config) else "pil"  # their pixels differ by a few levels of 255

    def build(new_array: NewArray) -> dict[str, Any]:
        about: dict[str, Any] = {"class_names": listings["train"].class_names, "corrupt": {}}
        for split, (_, files, labels) in listings.items():
            images_NHWC = new_array(f"{split}_images", (len(files), config.size, config.size, 3), np.uint8)
            new_array(f"{split}_labels", (len(files),), np.int64)[:] = labels
            reasons = decode(files, images_NHWC, decoder, config.num_threads)
            about["corrupt"][split] = [(row, str(files[row].relative_to(root)), why) for row, why in reasons.items()]
            if split == "train":
                good = np.delete(np.arange(len(files)), list(reasons))
                about["mean"], about["std"] = moments(good, images_NHWC)
        return about

    files = [*listings["train"].files, *listings["test"].files]
    prepared = prepare("folder", root, files, build, config.size, decoder)
    answer_for_corrupt(prepared, config.on_corrupt)
    return prepared


def scan(folder: Path) -> Listing:
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: {LAYOUT}")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"{folder} holds {len(classes)} class folders, two are the least: {LAYOUT}")
    files: list[Path] = []
    labels: list[int] = []
    for label, of_class in enumerate(classes):
        found = find_images(of_class)
        if not found:
            raise ValueError(f"{of_class} holds no images ({', '.join(sorted(SUFFIXES))}): fill or remove it")
        files += found
        labels += [label] * len(found)
    return Listing([path.name for path in classes], files, labels)


def find_images(folder: Path) -> list[Path]:
    """All images in the folder and its subfolders except hidden files, always in the same order."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def require_same_classes(root: Path, train: list[str], test: list[str]) -> None:
    if lacking := sorted(set(train) - set(test)):
        raise ValueError(f"{root / 'test'} lacks the class folders {', '.join(lacking)}, which train has")
    if unknown := sorted(set(test) - set(train)):
        raise ValueError(f"{root / 'test'} has the class folders {', '.join(unknown)}, which train lacks")


def decode(files: Sequence[Path], images_NHWC: NDArray[np.uint8], decoder: str, num_threads: int) -> dict[int, str]:
    """Fills the images. Returns row -> reason for those that cannot be decoded, which stay black.

    A batch that DALI refuses goes to PIL, which knows more formats and says which file is wrong and why.
    """
    size = images_NHWC.shape[1]
    starts = range(0, len(files), DECODED_AT_ONCE)
    batches = [files[start : start + DECODED_AT_ONCE] for start in starts]
    by_dali: Iterable[NDArray[np.uint8] | None] = [None] * len(batches)
    if decoder == "dali":
        from dicedist.data import dali

        by_dali = dali.decode(batches, size, num_threads)
    reasons: dict[int, str] = {}
    progress = Progress(len(files), "decoded images", stream=sys.stderr)
    with ThreadPoolExecutor(num_threads) as threads:
        for start, batch, images in zip(starts, batches, by_dali, strict=True):
            decoded = threads.map(lambda file: decode_file(file, size), batch) if images is None else images
            for row, image in enumerate(decoded, start):
                if isinstance(image, str):
                    reasons[row] = image
                images_NHWC[row] = 0 if isinstance(image, str) else image
            progress.show(start + len(batch))
    progress.clear()
    return reasons


def decode_file(path: Path, size: int, fit: Fit = shrink_and_crop) -> NDArray[np.uint8] | str:
    """The image as uint8 [size, size, 3], or the reason why it cannot be decoded."""
    try:
        with open_image(path) as image:
            return np.asarray(fit(as_rgb(image), size))
    except Exception as error:  # a damaged file makes PIL raise anything, from SyntaxError to struct.error
        return printable(" ".join(str(error).replace(f" '{path}'", "").split())) or type(error).__name__


def open_image(path: Path) -> Image.Image:
    """Only the head is read: what is no plain file or would take gigabytes is refused before it is decoded."""
    if not path.is_file():
        raise ValueError("there is no such file" if not path.exists() else "not a plain file")
    image = Image.open(path)
    try:
        refuse_outsized(image)
    except ValueError:
        image.close()
        raise
    return image


def is_unfit(path: Path) -> bool:
    """Whether DALI must not see the file: it would decode whatever the head promises."""
    try:
        open_image(path).close()
    except Exception:
        return True
    return False


def moments(rows: NDArray[np.int64], images_NHWC: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per colour, for images scaled to 0..1."""
    values = np.arange(256) / 255
    counts = np.zeros((3, 256))
    for start in range(0, len(rows), 1024):
        block = images_NHWC[rows[start : start + 1024]]
        counts += [np.bincount(block[..., colour].ravel(), minlength=256) for colour in range(3)]
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean.tolist(), np.maximum(std, 1 / 255).tolist()  # std is zero if all pixels have one colour


def answer_for_corrupt(prepared: Prepared, on_corrupt: str) -> None:
    """Logs images that cannot be decoded; ValueError if they may not be skipped or if a class has no others."""
    about = prepared.about
    corrupt = [Corrupt(*entry) for entries in about["corrupt"].values() for entry in entries]
    if corrupt and on_corrupt == "refuse":
        first = "; ".join(f"{bad.file}: {bad.reason}" for bad in corrupt[:3])
        more = f"; and {len(corrupt) - 3} more" if len(corrupt) > 3 else ""
        number = plural(len(corrupt), "image")
        raise ValueError(f"{number} cannot be decoded ({first}{more}): remove them, or write data.on_corrupt=skip")
    for bad in corrupt[:LISTED]:
        log.warning("left out %s: %s", printable(bad.file), bad.reason)
    if len(corrupt) > LISTED:
        log.warning("left out %s more that cannot be decoded", plural(len(corrupt) - LISTED, "image"))
    for split, entries in about["corrupt"].items():
        labels = np.delete(prepared.array(f"{split}_labels"), [entry[0] for entry in entries])
        counts = np.bincount(labels, minlength=len(about["class_names"]))
        if not counts.all():
            empty = about["class_names"][int(counts.argmin())]
            raise ValueError(f"{split}/{empty}: none of its images can be decoded")


SETS = {"folder": prepare_folder}
