"""A map-style dataset by a class of the user. data._target_ names the class, which is called once for each split.

    class Leaves(torch.utils.data.Dataset):
        def __init__(self, split, root): ...              split is "train", "test", or "val" with data.split=given
        def __len__(self): ...
        def __getitem__(self, index): return image, 3     a PIL image, uint8 [H, W, C], or a vector of floats; the class
        class_names = ["elm", "oak", ...]                 optional
        labels = [...]                                    optional: saves reading every item at the start

dicedist chooses the order, the crops and the flips, so the items must not be augmented.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dicedist.config.schema import DataConfig
from dicedist.config.targets import LOCAL, resolve
from dicedist.console.lines import printable
from dicedist.data import images
from dicedist.data.prepared import Prepared
from dicedist.data.reading import MEASURED, SPLITS, reason, shown
from dicedist.data.sets import vectors


class Items:
    """Items in place of an array of inputs in a Split. They are read when they are needed."""

    def __init__(self, dataset: Any, name: str, size: int, channels: int):
        self.dataset, self.name, self.size, self.channels = dataset, name, size, channels

    @property
    def wanted(self) -> str:
        C, image = self.channels, "a PIL image, " if self.channels in images.MODES else ""
        return f"{image}uint8 [H, W, {C}], float [{C}, H, W] in 0..1, or a vector of floats; and its class, from 0"

    def index_select(self, dim: int, rows_B: Tensor) -> Tensor:
        assert dim == 0
        return torch.from_numpy(self.stacked([self.item(row)[0] for row in rows_B.tolist()]))

    def stacked(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(shapes := {each.shape for each in inputs}) > 1:
            raise ValueError(f"{self.name} returns inputs of the shapes {sorted(shapes)}: return one width")
        return np.stack(inputs)

    def item(self, row: int) -> tuple[NDArray[Any], int]:
        """Return uint8 [S, S, C] or float32 [V], and the label."""
        value, label = self.pair(row)
        return self.taken(value, row), label

    def pair(self, row: int) -> tuple[Any, int]:
        """Return the input as the dataset returns it, and the label."""
        try:
            found = self.dataset[row]
        except Exception as error:  # code of the user may raise anything
            raise ValueError(f"{self.name}[{row}] raises {type(error).__name__}: {reason(error)}") from error
        if not isinstance(found, tuple | list) or len(found) != 2:
            is_group = isinstance(found, tuple | list)
            kind = f"a group of {len(found)}" if is_group else f"of type {type(found).__name__}"
            raise ValueError(f"{self.name}[{row}] is {kind}, no pair: return {self.wanted}")
        value, label = found
        if isinstance(label, bool) or not isinstance(label, (int, np.integer)) and not is_whole(label) or label < 0:
            raise ValueError(f"{self.name}[{row}] has the class {printable(str(label))!r}: return {self.wanted}")
        return value, int(label)

    def taken(self, value: Any, row: int) -> NDArray[Any]:
        if isinstance(value, Image.Image):
            return images.fit_image(value, self.size, self.channels)
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        is_float = array.dtype.kind == "f"
        if self.channels == 1 and array.ndim == 2:
            array = array[None] if is_float else array[..., None]
        if is_float and array.ndim == 3 and array.shape[0] == self.channels:  # as torchvision's ToTensor returns
            if not (array >= 0).all() or not (array <= 1).all():
                raise ValueError(f"{self.name}[{row}] holds values outside 0..1: return images before normalization")
            array = np.round(array * 255).astype(np.uint8).transpose(1, 2, 0)
        if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == self.channels:
            return images.fit_array(array, self.size)
        if is_float and array.ndim == 1 and array.size:
            if not np.isfinite(array).all():
                raise ValueError(f"{self.name}[{row}] holds a value that is no finite number")
            return array.astype(np.float32)
        found = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{self.name}[{row}] is {found}: return {self.wanted}; or write data.channels")


def is_whole(label: Any) -> bool:
    return isinstance(label, Tensor) and label.ndim == 0 and not label.is_floating_point()


def prepare_own(config: DataConfig, root: Path) -> Prepared:
    """Digest a sample of the items. Keep nothing on the disk, because changes of the user's data cannot be noticed."""
    splits = {split: items_of(config, split) for split in (*SPLITS, *(("val",) if config.split == "given" else ()))}
    labels = {split: labels_of(items) for split, items in splits.items()}
    train = splits["train"]
    rows = range(0, len(labels["train"]), -(-len(labels["train"]) // MEASURED))
    sampled = {row: train.item(row) for row in rows}
    for row, (_, label) in sampled.items():
        if label != labels["train"][row]:
            raise ValueError(f"{train.name}[{row}] has the class {label}, and its labels say {labels['train'][row]}")
    values = train.stacked([value for value, _ in sampled.values()])
    is_vectors = values.ndim == 2
    mean, std = vectors.moments(values) if is_vectors else images.moments([values])
    digest = hashlib.blake2b(values.tobytes(), digest_size=16)
    for found in labels.values():
        digest.update(found.tobytes())
    largest = max(int(found.max()) for found in labels.values())
    names = class_names_of(train.dataset) or [str(number) for number in range(largest + 1)]
    about: dict[str, Any] = {"kind": "own", "inputs": "vectors" if is_vectors else "images", "class_names": names}
    about |= {"mean": mean, "std": std, "digest": digest.hexdigest()}
    return Prepared(about, None, {f"{split}_labels": found for split, found in labels.items()})


def items_of(config: DataConfig, split: str) -> Items:
    assert config._target_ is not None, "refused with the config"
    dataset_class = resolve("data", config._target_, config.trusted)
    return made(dataset_class, config._target_, split, config.root, config.size, config.channels)


@functools.lru_cache(maxsize=8)
def made(
    dataset_class: Callable[..., Any], target: str, split: str, root: str | None, size: int, channels: int
) -> Items:
    try:
        dataset = dataset_class(split, root)
    except Exception as error:  # code of the user may raise anything
        what = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(f"data._target_={target} cannot be made of ({split!r}, {root!r}): {what}") from error
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
        raise ValueError(f"data._target_={target}: its {split} set has no items; give it __len__ and __getitem__")
    # An object that Python code has handed over is known to the user by its split only.
    return Items(dataset, split if target.startswith(LOCAL) else f"{target}({split!r})", size, channels)


def labels_of(items: Items) -> NDArray[np.int64]:
    """Return the classes that a dataset lists, or else read every item."""
    known = listed_classes(items.dataset)
    if known is None:
        rows = shown(range(len(items.dataset)), len(items.dataset), f"labels of {items.name}")
        return np.array([items.item(row)[1] for row in rows], np.int64)
    labels_N = np.asarray(known)
    if labels_N.shape != (len(items.dataset),) or labels_N.dtype.kind not in "iu" or (labels_N < 0).any():
        found = f"{labels_N.dtype} {list(labels_N.shape)}"
        raise ValueError(f"{items.name}.labels are {found}: give a whole number from 0 for each item")
    return labels_N.astype(np.int64)


def listed_classes(dataset: Any) -> Any:
    """Return the classes that a dataset lists, as torchvision's do; None if the items must be read to find them."""
    found = getattr(dataset, "labels", None)
    return getattr(dataset, "targets", None) if found is None else found


def class_names_of(dataset: Any) -> list[str] | None:
    found = getattr(dataset, "class_names", None)
    found = getattr(dataset, "classes", None) if found is None else found
    return None if found is None else [str(name) for name in found]


SETS = {"own": prepare_own}
OPENED = {"own": lambda prepared, split, config: items_of(config, split)}
