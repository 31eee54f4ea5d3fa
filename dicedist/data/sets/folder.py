"""Images of the user in root/train/<class>/ and root/test/<class>/, in root/<class>/, or in a list.

A list has the columns path, label and split. Images in root/<class>/ are split by data.test_fraction.

data=folder decodes all images once and keeps them at one size. data=files lists the images and decodes them on the fly.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicedist.cluster.heartbeat import advance
from dicedist.config.schema import DataConfig
from dicedist.console.lines import plural, printable
from dicedist.data import uses_dali
from dicedist.data.encoded import Encoded, Files, index, open_listed
from dicedist.data.images import Fit, decode_file, moments
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.reading import SPLITS, for_test, other_channels, shown
from dicedist.data.sets.vectors import columns_of, refuse_missing, words_in

log = logging.getLogger(__name__)

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LAYOUT = "data=folder needs train/<class>/*.jpg and test/<class>/*.jpg in data.root, or <class>/*.jpg alone"
DECODED_AT_ONCE = 16  # files at once; a photograph takes 36 MB before it is resized
LISTS = (".csv", ".parquet")
Found = list[tuple[Path, int]]  # path in the folder, label


def prepare_folder(config: DataConfig, root: Path) -> Prepared:
    class_names, files = from_folder(root, config)
    decoder = "dali" if uses_dali(config) else "pil"  # pixels of the two decoders differ by a few levels of 255

    def build(new_array: NewArray) -> dict[str, Any]:
        about: dict[str, Any] = {"class_names": class_names, "corrupt": {}}
        for split, found in files.items():
            shape = (len(found), config.size, config.size, config.channels)
            images_NHWC = new_array(f"{split}_images", shape, np.uint8)
            new_array(f"{split}_labels", (len(found),), np.int64)[:] = [label for _, label in found]
            reasons = decode([root / path for path, _ in found], images_NHWC, decoder, config.num_threads)
            about["corrupt"][split] = [(row, str(found[row][0]), why) for row, why in reasons.items()]
            if split == "train":
                good = np.delete(np.arange(len(found)), list(reasons))
                blocks = np.array_split(good, -(-len(good) // 1024) or 1)
                about["mean"], about["std"] = moments(images_NHWC[rows] for rows in blocks)
        return about

    every = [root / path for found in files.values() for path, _ in found]
    return prepare("folder", root, every, build, config.size, decoder, *other_channels(config), *division(root, config))


def prepare_files(config: DataConfig, root: Path) -> Prepared:
    class_names, found = from_list(root, config) if root.is_file() else from_folder(root, config)
    folder = root if root.is_dir() else root.parent

    def build(new_array: NewArray) -> dict[str, Any]:
        listings = {}
        for split, images in found.items():
            paths, labels = zip(*images, strict=True)
            paths_R = put_texts(new_array, f"{split}_paths", paths)
            num_bytes = [(folder / path).stat().st_size for path in paths]
            listings[split] = labels, num_bytes, files_in(folder, paths_R)
        return {**index(listings, class_names, config, new_array), "kind": "files", "folder": str(folder)}

    every = [folder / path for images in found.values() for path, _ in images]
    listed = hashlib.sha256(root.read_bytes()).hexdigest() if root.is_file() else None
    settings = (root.name, listed, config.size, config.label_column)
    return prepare("files", folder, every, build, *settings, *other_channels(config), *division(root, config))


def files_in(folder: Path, paths_R: Any) -> Files:
    return Files(lambda row: text_of(paths_R[row]), lambda row: (folder / text_of(paths_R[row])).read_bytes())


def put_texts(new_array: NewArray, name: str, texts: Sequence[object]) -> Any:
    encoded = [str(text).encode(errors="surrogateescape") for text in texts]
    array = new_array(name, (len(encoded),), np.dtype(f"S{max(map(len, encoded))}"))
    array[:] = encoded
    return array


def text_of(encoded: bytes) -> str:
    """Undo the encoding of `put_texts`. The name of a file need not be UTF-8."""
    return encoded.decode(errors="surrogateescape")


def open_files(prepared: Prepared, split: str, config: DataConfig) -> Encoded:
    folder = Path(prepared.about["folder"])
    return open_listed(prepared, split, config, folder, files_in(folder, prepared.array(f"{split}_paths")))


def is_flat(root: Path) -> bool:
    """Return true if a folder holds class folders directly, without train/ and test/."""
    return root.is_dir() and not any((root / split).is_dir() for split in SPLITS)


def division(root: Path, config: DataConfig) -> tuple[object, ...]:
    """Return the settings that choose the test images of a flat folder; nothing for other data."""
    return (config.test_fraction, config.split_seed) if is_flat(root) else ()


def from_folder(root: Path, config: DataConfig) -> tuple[list[str], dict[str, Found]]:
    """Return the names of the classes, and the images of each split."""
    if not is_flat(root):
        return from_splits(root)
    names, found = scan(root)
    is_test_N = for_test(np.array([label for _, label in found]), config)
    files = {
        split: [image for image, is_test in zip(found, is_test_N, strict=True) if is_test == (split == "test")]
        for split in SPLITS
    }
    for label, name in enumerate(names):
        counts = {split: sum(y == label for _, y in images) for split, images in files.items()}
        if not all(counts.values()):
            raise ValueError(
                f"{root / name} holds {sum(counts.values())} images, of which data.test_fraction="
                f"{config.test_fraction:g} leaves {counts['train']} to train on and {counts['test']} to test on: "
                "add images, or write another fraction"
            )
    return names, files


def from_splits(root: Path) -> tuple[list[str], dict[str, Found]]:
    """Read the layout with train/ and test/."""
    files, names = {}, {}
    for split in SPLITS:
        names[split], found = scan(root / split)
        files[split] = [(split / path, label) for path, label in found]
    if lacking := sorted(set(names["train"]) - set(names["test"])):
        raise ValueError(f"{root / 'test'} lacks the class folders {', '.join(lacking)}, which train has")
    if unknown := sorted(set(names["test"]) - set(names["train"])):
        raise ValueError(f"{root / 'test'} has the class folders {', '.join(unknown)}, which train lacks")
    return names["train"], files


def from_list(file: Path, config: DataConfig) -> tuple[list[str], dict[str, Found]]:
    """Read the columns path (relative to the list's folder), split (train or test) and label, a word or a number."""
    if file.suffix not in LISTS:
        raise ValueError(f"data.root={file}: write a folder, or a list {' or '.join(LISTS)} of path, label and split")
    columns = columns_of(file)
    if lacking := [name for name in ("path", config.label_column, "split") if name not in columns]:
        raise ValueError(f"{file} has no column {lacking[0]}: write path, {config.label_column} and split in it")
    labels = words_in(columns[config.label_column])
    refuse_missing(labels, file)
    names = sorted(set(labels), key=int if all(map(str.isdigit, labels)) else str)
    if len(names) < 2:
        raise ValueError(f"{file} names {len(names)} classes, at least two are needed")
    number = {name: place for place, name in enumerate(names)}
    files: dict[str, Found] = {split: [] for split in SPLITS}
    for path, label, split in zip(columns["path"], labels, columns["split"], strict=True):
        if split not in files:
            raise ValueError(f"{file}: split is {printable(str(split))!r}, write train or test")
        if not (file.parent / str(path)).is_file():
            raise ValueError(f"{file} names {printable(str(path))}, which is not in {file.parent}")
        files[split].append((Path(str(path)), number[label]))
    for split, found in files.items():
        if len({label for _, label in found}) < len(names):
            raise ValueError(f"{file}: {split} has images of {len({y for _, y in found})} of {len(names)} classes")
    return names, files


def scan(folder: Path) -> tuple[list[str], Found]:
    """Return the names of the class folders, and the images in them."""
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: {LAYOUT}")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"{folder} holds {len(classes)} class folders, at least two are needed: {LAYOUT}")
    files: Found = []
    for label, of_class in enumerate(classes):
        found = find_images(of_class)
        if not found:
            raise ValueError(f"{of_class} holds no images ({', '.join(sorted(SUFFIXES))}): fill or remove it")
        files += [(path.relative_to(folder), label) for path in found]
    return [path.name for path in classes], files


def find_images(folder: Path) -> list[Path]:
    """Return all images in the folder and its subfolders, without hidden files, always in the same order."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def decode(files: Sequence[Path], images_NHWC: NDArray[np.uint8], decoder: str, num_threads: int) -> dict[int, str]:
    """Fill the images. Return row -> reason for images that cannot be decoded; they stay black.

    A batch that DALI refuses goes to PIL, which reads more formats and names the wrong file with the reason.
    """
    size, channels = images_NHWC.shape[2:]
    batches = [files[start : start + DECODED_AT_ONCE] for start in range(0, len(files), DECODED_AT_ONCE)]
    by_dali: Iterable[NDArray[np.uint8] | None] = [None] * len(batches)
    if decoder == "dali":
        from dicedist.data import dali

        by_dali = dali.decode(batches, size, num_threads)
    by_pil = partial(decode_file, size=size, channels=channels)
    reasons: dict[int, str] = {}
    with ThreadPoolExecutor(num_threads) as threads:
        every = (
            image
            for batch, images in zip(batches, by_dali, strict=True)
            for image in (threads.map(by_pil, batch) if images is None else images)
        )
        for row, image in enumerate(shown(every, len(files), "decoded images")):
            if isinstance(image, str):
                reasons[row] = image
            images_NHWC[row] = 0 if isinstance(image, str) else image
    return reasons


def decode_sound(
    origin: Path, files: Sequence[Path], size: int, channels: int, fit: Fit
) -> tuple[NDArray[np.uint8], list[int]]:
    """Return the images that can be decoded, and the positions of their files."""
    images = {}
    for place, file in enumerate(files):
        if not isinstance(image := decode_file(file, size, fit, channels), str):
            images[place] = image
        advance()
    if not images:
        raise ValueError(f"{origin} holds no images that can be decoded")
    if damaged := len(files) - len(images):
        log.warning("%s: left out %s that cannot be decoded", origin, plural(damaged, "image"))
    return np.stack(list(images.values())), list(images)


SETS = {"folder": prepare_folder, "files": prepare_files}
OPENED = {"files": open_files}
