"""Data that Python code hands over: a Dataset, a DataLoader, or arrays.

Legend: N inputs, H rows, W columns, C channels, V values of a vector.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from dicedist.algorithm.randomness import generator
from dicedist.data.sets.own import Items, class_names_of, labels_of, listed_classes
from dicedist.data.sources import place_in_class

TEST_FRACTION = 0.2  # of each class, if no test set is given
FORMS = "give a Dataset of (input, class), a DataLoader, or a pair of arrays (inputs, classes)"


class Arrays:
    """Inputs and classes in memory: images uint8 [N, H, W, C] or float [N, C, H, W] in 0..1, or vectors [N, V]."""

    def __init__(self, inputs_N: Any, labels_N: Any):
        self.inputs_N, self.labels = as_array(inputs_N), as_array(labels_N)
        if self.labels.ndim != 1 or len(self.labels) != len(self.inputs_N):
            raise ValueError(f"{len(self.inputs_N)} inputs and classes {list(self.labels.shape)}: give one for each")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.inputs_N[row], self.labels[row]


class Labeled(Subset[Any]):
    """Some items of a dataset, with their classes if the dataset lists them."""

    def __init__(self, dataset: Any, rows: Sequence[int]):
        super().__init__(dataset, rows)
        known = listed_classes(dataset)
        self.labels = None if known is None else np.asarray(known)[np.asarray(rows, np.int64)]
        self.class_names = class_names_of(dataset)


class Given:
    """The splits of one training. It is called like a dataset class of the user (data._target_)."""

    def __init__(self, train: Any, val: Any, test: Any):
        self.splits = {"train": as_dataset(train, "train")}
        if test is None:
            kept, held = divided(self.splits["train"])
            self.splits = {"train": kept, "test": held}
        else:
            self.splits["test"] = as_dataset(test, "test")
        if val is not None:
            self.splits["val"] = as_dataset(val, "val")

    def __call__(self, split: str, root: str | None) -> Any:
        return self.splits[split]

    def side(self) -> int | None:
        """Return the side of the first image if it is square; None for others and for vectors."""
        try:
            first = self.splits["train"][0][0]
            sides = first.size if isinstance(first, Image.Image) else tuple(np.asarray(first).shape)
        except Exception:  # reported with its row when the data are read
            return None
        if len(sides) == 3:
            sides = sides[:2] if sides[0] == sides[1] else sides[1:]
        return int(sides[0]) if len(sides) == 2 and sides[0] == sides[1] else None


def as_dataset(given: Any, name: str) -> Any:
    """Return an object with items (input, class), their number, and perhaps `labels` and `class_names`."""
    if isinstance(given, DataLoader):
        given = given.dataset
    if isinstance(given, tuple | list) and len(given) == 2 and all(map(is_arraylike, given)):
        return Arrays(*given)
    if isinstance(given, Subset) and not isinstance(given, Labeled):
        return Labeled(given.dataset, given.indices)
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")) or isinstance(
        given, str | Tensor | np.ndarray
    ):
        raise ValueError(f"{name}={type(given).__name__}: {FORMS}")
    return given


def is_arraylike(value: Any) -> bool:
    return hasattr(value, "__array__") or isinstance(value, list)


def as_array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


class Labels(Items):
    """Items whose inputs are not converted, because only their classes are read."""

    def item(self, row: int) -> tuple[Any, int]:
        return self.pair(row)


def divided(dataset: Any) -> tuple[Labeled, Labeled]:
    """Split a dataset into training and test items, by class, always in the same way."""
    labels_N = torch.from_numpy(labels_of(Labels(dataset, "train", size=0, channels=3)))
    shuffled_N = torch.randperm(len(labels_N), generator=generator("cpu", 0, "test split"))
    counts_K = labels_N.bincount()
    held_K = (counts_K * TEST_FRACTION).round().long().clamp(max=counts_K - 1)
    is_test_N = torch.zeros(len(labels_N), dtype=torch.bool)
    is_test_N[shuffled_N] = place_in_class(labels_N[shuffled_N]) < held_K[labels_N[shuffled_N]]
    if not is_test_N.any():
        raise ValueError(f"{len(labels_N)} training inputs are too few to split a test set off: give test=")
    train, test = (Labeled(dataset, chosen.nonzero().flatten().tolist()) for chosen in (~is_test_N, is_test_N))
    return train, test
