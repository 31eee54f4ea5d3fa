"""The images and labels of a run: train, validation and test, by name.

Legend: R images that the files hold, N images of a split, H rows, W columns, C colours.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dicedist.algorithm.randomness import generator
from dicedist.config.schema import DataConfig
from dicedist.data.prepared import Prepared, home
from dicedist.data.sets import SETS


@dataclass(frozen=True)
class Split:
    images_RHWC: Tensor | None  # uint8, mapped and shared; None if only labels are needed
    labels_N: Tensor  # int64
    rows_N: Tensor | None = None  # which rows of the images; None: all, in order

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, indices_B: Tensor) -> Tensor:
        """A copy of the images [B, H, W, C]."""
        assert self.images_RHWC is not None, "loaded with labels_only"
        return self.images_RHWC.index_select(0, indices_B if self.rows_N is None else self.rows_N[indices_B])

    @property
    def images_NHWC(self) -> Tensor:
        """All images of the split: a copy, unless the split is everything that the files hold."""
        assert self.images_RHWC is not None, "loaded with labels_only"
        return self.images_RHWC if self.rows_N is None else self.take(torch.arange(len(self)))


@dataclass(frozen=True)
class Source:
    name: str
    class_names: list[str]
    mean: tuple[float, float, float]  # of images scaled to 0..1
    std: tuple[float, float, float]
    size: int
    train: Split
    val: Split  # empty with data.split=full
    test: Split
    data_digest: str  # of every pixel and label, and of the way they are split

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def load(config: DataConfig, labels_only: bool = False) -> Source:
    """Every process of a node may call this at once; the first prepares the images, which can take minutes."""
    root = Path(config.root).expanduser() if config.root else home()
    if config.name not in SETS:
        raise ValueError(f"data.name={config.name}: write one of {', '.join(SETS)}")
    prepared = SETS[config.name](config, root)
    about = prepared.about
    whole = whole_split(prepared, "train", labels_only)
    train_rows, val_rows = holdout(whole.labels_N, config)
    settings = (about["digest"], config.split, config.val_fraction, config.split_seed, config.train_limit)
    return Source(
        name=config.name,
        class_names=list(about["class_names"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        size=config.size,
        train=part(whole, train_rows),
        val=part(whole, val_rows),
        test=whole_split(prepared, "test", labels_only),
        data_digest=hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest(),
    )


def whole_split(prepared: Prepared, name: str, labels_only: bool) -> Split:
    labels_R = torch.from_numpy(prepared.array(f"{name}_labels"))
    num_classes = len(prepared.about["class_names"])
    if not 0 <= labels_R.min() <= labels_R.max() < num_classes:
        raise ValueError(f"{name}: labels from {labels_R.min()} to {labels_R.max()}, of {num_classes} classes")
    images_RHWC = None if labels_only else torch.from_numpy(prepared.array(f"{name}_images"))
    corrupt = [row for row, *_ in prepared.about.get("corrupt", {}).get(name, [])]
    if not corrupt:
        return Split(images_RHWC, labels_R)
    rows_N = torch.from_numpy(np.delete(np.arange(len(labels_R)), corrupt))
    return Split(images_RHWC, labels_R[rows_N], rows_N)


def part(whole: Split, chosen_N: Tensor) -> Split:
    rows_N = chosen_N if whole.rows_N is None else whole.rows_N[chosen_N]
    return Split(whole.images_RHWC, whole.labels_N[chosen_N], rows_N)


def holdout(labels_N: Tensor, config: DataConfig) -> tuple[Tensor, Tensor]:
    """Rows for training and for validation, stratified by class and independent of the run's seed."""
    held_N = torch.zeros_like(labels_N, dtype=torch.bool)
    if config.split == "holdout":
        counts_K = labels_N.bincount()
        held_K = (counts_K * config.val_fraction).round().long().clamp(max=counts_K - 1)
        shuffled_N = torch.randperm(len(labels_N), generator=generator("cpu", config.split_seed, "split"))
        held_N[shuffled_N] = place_in_class(labels_N[shuffled_N]) < held_K[labels_N[shuffled_N]]
        if not held_N.any():
            raise ValueError(
                f"data.val_fraction={config.val_fraction} of at most {counts_K.max()} images per class holds out none: "
                "write a larger one, or data.split=full"
            )
    train_rows, val_rows = (~held_N).nonzero().flatten(), held_N.nonzero().flatten()
    if config.train_limit is not None:
        first = place_in_class(labels_N[train_rows]).argsort(stable=True)[: config.train_limit]
        train_rows = train_rows[first.sort().values]
    return train_rows, val_rows


def place_in_class(labels_N: Tensor) -> Tensor:
    """For each input, how many inputs of its class come before it."""
    order_N = labels_N.argsort(stable=True)
    counts_K = labels_N.bincount()
    first_K = counts_K.cumsum(0) - counts_K
    place_N = torch.empty_like(labels_N)
    place_N[order_N] = torch.arange(len(labels_N)) - first_K[labels_N[order_N]]
    return place_N
