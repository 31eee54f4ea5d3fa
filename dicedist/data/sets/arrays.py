"""Images in arrays, with any number of channels: data.root=FILE.npz, or a FOLDER as in LAYOUTS.

Images are uint8 [N, H, W, C]; gray images may be [N, H, W]. Labels are whole numbers [N] from 0. An .npz may hold their
class_names. Images of another size than data.size are scaled and cropped like photographs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicedist.config.schema import DataConfig
from dicedist.data.images import fit_array, moments
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.reading import SPLITS, shown
from dicedist.data.sets.vectors import counted, divided, readable

LAYOUTS: tuple[dict[str, tuple[str, ...]], ...] = (  # the files of each split; or one file for both, called train
    {split: (f"{split}.npz",) for split in SPLITS},
    {split: (f"{split}_images.npy", f"{split}_labels.npy") for split in SPLITS},
    {"train": ("images.npy", "labels.npy")},
)
BLOCK = 1024  # images per block when mean and deviation are computed


def prepare_arrays(config: DataConfig, root: Path) -> Prepared:
    files = files_in(root)

    def build(new_array: NewArray) -> dict[str, Any]:
        found = {split: read(paths, config.channels) for split, paths in files.items()}
        first, names = files["train"][0], found["train"][2]
        if names is None:
            names = counted(found["train"][1].tolist(), first, "class_names in an .npz")
        if len(names) < 2:
            raise ValueError(f"{first} holds {len(names)} classes, at least two are needed")
        rows = {split: (images_NHWC, labels_N) for split, (images_NHWC, labels_N, _) in found.items()}
        if len(files) == 1:
            rows = divided(*rows["train"], None, config, first)
        about: dict[str, Any] = {"class_names": names}
        for split, (images_NHWC, labels_N) in rows.items():
            shape = (len(labels_N), config.size, config.size, config.channels)
            kept_NHWC = new_array(f"{split}_images", shape, np.uint8)
            fill(kept_NHWC, images_NHWC, split)
            new_array(f"{split}_labels", labels_N.shape, np.int64)[:] = labels_N
            if split == "train":
                blocks = (kept_NHWC[start : start + BLOCK] for start in range(0, len(kept_NHWC), BLOCK))
                about["mean"], about["std"] = moments(blocks)
        return about

    folder, every = root if root.is_dir() else root.parent, [path for paths in files.values() for path in paths]
    settings = (root.name, config.size, config.channels, config.test_fraction, config.split_seed)
    return prepare("arrays", folder, every, build, *settings)


def files_in(root: Path) -> dict[str, list[Path]]:
    if root.suffix == ".npz" and root.is_file():
        return {"train": [root]}
    for layout in LAYOUTS:
        files = {split: [root / name for name in names] for split, names in layout.items()}
        if all(path.is_file() for paths in files.values() for path in paths):
            return files
    layouts = ", or ".join(" and ".join(name for names in layout.values() for name in names) for layout in LAYOUTS)
    raise ValueError(f"data.root={root}: write a FILE.npz that holds images and labels, or a FOLDER with {layouts}")


def read(paths: Sequence[Path], channels: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str] | None]:
    """Return images [N, H, W, C], labels [N] and the names of the classes, if the file has names."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in paths:
        with readable(path):
            if path.suffix == ".npy":
                arrays[path.stem.rpartition("_")[2]] = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                with np.load(path, allow_pickle=False) as file:
                    arrays |= {name: file[name] for name in file.files}
    if not {"images", "labels"} <= arrays.keys():
        raise ValueError(f"{paths[0]} holds {', '.join(arrays) or 'nothing'}: write images [N, H, W, C] and labels [N]")
    images, labels_N, names = arrays["images"], arrays["labels"], arrays.get("class_names")
    images_NHWC = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images_NHWC.ndim != 4 or images_NHWC.shape[3] != channels or not images.size:
        raise ValueError(
            f"{paths[0]}: images are {images.dtype} {list(images.shape)}, and data.channels={channels}: write uint8 "
            f"[N, H, W, {channels}], or another data.channels"
        )
    if labels_N.dtype.kind not in "iu" or labels_N.shape != (len(images),) or labels_N.min() < 0:
        found = f"{len(images):,} images and labels {labels_N.dtype} {list(labels_N.shape)}"
        raise ValueError(f"{paths[-1]}: {found}: write a whole number from 0 for each image")
    return images_NHWC, labels_N.astype(np.int64), None if names is None else [str(name) for name in names]


def fill(kept_NHWC: NDArray[np.uint8], images_NHWC: NDArray[np.uint8], split: str) -> None:
    """Copy images, scaled and cropped to the size of the data."""
    if kept_NHWC.shape == images_NHWC.shape:
        kept_NHWC[:] = images_NHWC
        return
    for row, image_HWC in enumerate(shown(images_NHWC, len(images_NHWC), f"resized images of {split}")):
        kept_NHWC[row] = fit_array(image_HWC, kept_NHWC.shape[1])


SETS = {"arrays": prepare_arrays}
