"""The inputs (images or vectors) and labels of a run: train, validation and test, by name.

Legend: R inputs that the files hold, N inputs of a split, H rows, W columns, C channels, V values of a vector.
"""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dicedist.algorithm.randomness import generator
from dicedist.config.schema import DataConfig
from dicedist.console.lines import plural, printable, redacted
from dicedist.data.encoded import Encoded
from dicedist.data.prepared import Prepared, home
from dicedist.data.sets import OPENED, SETS
from dicedist.data.sets.own import Items
from dicedist.data.sets.vectors import SETS as VECTOR_SETS

if TYPE_CHECKING:
    from dicedist.data.frozen import FrozenTrunk

log = logging.getLogger(__name__)

IMAGES, VECTORS = "images", "vectors"
LISTED = 20  # corrupt files named in the log
LEAST_HELD_OUT = 500  # data.val_limit=auto keeps this many inputs, to calibrate thresholds and label sets
MOST_HELD_OUT = 50_000  # rank 0 holds the logits of all held-out inputs after an epoch
# data.val_fraction=auto: shares and numbers of inputs. 45 right answers in a row are the fewest that show an error rate
# of at most 5 % (calibration.risk, calibration.guarantee). With 2,000, label sets cover 90 ± 1.3 % (calibration.alpha).
AUTO_SHARE, AUTO_LEAST, AUTO_ENOUGH, AUTO_OF_MANY = 0.2, 50, 2000, 0.05


@dataclass(frozen=True)
class Split:
    inputs_R: Tensor | Encoded | Items | None  # uint8 images or float32 vectors, mapped and shared; None: labels only
    labels_N: Tensor  # int64
    rows_N: Tensor | None = None  # rows of inputs_R in this split; None: all, in order
    outputs_N: Tensor | None = None  # float32 [N, views, ...] of a frozen trunk; members read them, not the inputs

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, indices_B: Tensor) -> Tensor:
        """Copy the images [B, H, W, C] or vectors [B, V]."""
        assert self.inputs_R is not None, "loaded with labels_only"
        return self.inputs_R.index_select(0, self.rows_of(indices_B))

    def rows_of(self, indices_B: Tensor) -> Tensor:
        return indices_B if self.rows_N is None else self.rows_N[indices_B]

    def take_outputs(self, indices_B: Tensor, turn: int) -> Tensor:
        """Copy one view of each input's outputs. Every turn takes the next view, and neighbors have different views."""
        assert self.outputs_N is not None
        views = self.outputs_N.shape[1]
        return self.outputs_N.flatten(0, 1).index_select(0, indices_B * views + (indices_B + turn) % views)

    @property
    def images_NHWC(self) -> Tensor:
        """Return all images of the split: a copy, unless the split holds all images of the files."""
        assert self.inputs_R is not None, "loaded with labels_only"
        if self.rows_N is None and isinstance(self.inputs_R, Tensor):
            return self.inputs_R
        return self.take(torch.arange(len(self)))


@dataclass(frozen=True)
class Source:
    name: str
    class_names: list[str]
    mean: tuple[float, ...]  # of each channel, for images scaled to 0..1; of each value of a vector
    std: tuple[float, ...]
    size: int  # pixels of a side
    train: Split
    val: Split  # empty with data.split=full
    test: Split
    data_digest: str  # of all pixels and labels, and of the splits
    kind: str = IMAGES  # or vectors
    trunk: "FrozenTrunk | None" = None  # a frozen trunk reads every split once, and members read its outputs
    columns: tuple[str, ...] | None = None  # names of the values of a vector, if the table has names

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def seen(self, split: Split) -> Split:
        """Return a split of any images as members see it: with the outputs of the trunk, if there is one."""
        return split if self.trunk is None or split.outputs_N is not None else self.trunk.read(split, self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input of a network."""
        return (len(self.mean),) if self.kind == VECTORS else (len(self.mean), self.size, self.size)


def load(config: DataConfig, labels_only: bool = False) -> Source:
    """Load the data. All processes of a node may call this at once; the first prepares the images (minutes)."""
    prepared = prepare(config)
    about = prepared.about
    whole, tested = (whole_split(prepared, name, None if labels_only else config) for name in ("train", "test"))
    if len(whole.labels_N.unique()) < 2:
        only = printable(about["class_names"][int(whole.labels_N[0])])
        raise ValueError(f"data={config.name}: all training inputs are of the class {only}: give at least two classes")
    train_rows, val_rows = holdout(whole.labels_N, config)
    held = part(whole, val_rows)
    if config.split == "given":
        held = whole_split(prepared, "val", None if labels_only else config)
    val = limited(held, most_held_out(config, len(whole) - len(val_rows), len(held)))
    test = limited(tested, config.test_limit)
    limits = (("val", val, held), ("test", test, tested))
    cut = [(name, len(some)) for name, some, every in limits if len(some) < len(every)]
    share = share_held_out(config, len(whole)) if config.split == "holdout" else config.val_fraction
    settings = (about["digest"], config.split, share, config.split_seed, config.train_limit, *cut)
    return Source(
        name=config.name,
        class_names=list(about["class_names"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        size=config.size,
        train=part(whole, train_rows),
        val=val,
        test=test,
        data_digest=hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest(),
        kind=VECTORS if holds_vectors(prepared) else IMAGES,
        columns=columns_of(prepared),
    )


def of_run(data: DataConfig, root: str | None = None, trusted: bool = False) -> DataConfig:
    """Load the data of a run that may come from somebody else: only the command line may name an address or trust code.

    root, trusted: from the command line.
    """
    if root is None and data.root is not None and "://" in data.root:
        place = redacted(data.root)
        raise ValueError(f"the run reads its data from {place}: add data.root={place} if you trust that address")
    return replace(data, root=root or data.root, download=False, trusted=trusted)


def prepare(config: DataConfig) -> Prepared:
    if config.name not in SETS:
        raise ValueError(f"data.name={config.name}: write one of {', '.join(SETS)}")
    prepared = SETS[config.name](config, Path(config.root).expanduser() if config.root else home())
    answer_for_corrupt(prepared, config.on_corrupt)
    return prepared


def answer_for_corrupt(prepared: Prepared, on_corrupt: str) -> None:
    """Log images that cannot be decoded. Raise a ValueError if they may not be skipped, or if a class has no others."""
    listed, class_names = prepared.about.get("corrupt", {}), prepared.about["class_names"]
    corrupt = [(file, why) for entries in listed.values() for _, file, why in entries]
    if corrupt and on_corrupt == "refuse":
        first = "; ".join(f"{file}: {why}" for file, why in corrupt[:3])
        more = f"; and {len(corrupt) - 3} more" if len(corrupt) > 3 else ""
        number = plural(len(corrupt), "image")
        raise ValueError(f"{number} cannot be decoded ({first}{more}): remove them, or write data.on_corrupt=skip")
    for file, why in corrupt[:LISTED]:
        log.warning("left out %s: %s", printable(file), why)
    if len(corrupt) > LISTED:
        log.warning("left out %s more that cannot be decoded", plural(len(corrupt) - LISTED, "image"))
    for split, entries in listed.items():
        labels = np.delete(prepared.array(f"{split}_labels"), [row for row, *_ in entries])
        counts = np.bincount(labels, minlength=len(class_names))
        if not counts.all():
            raise ValueError(f"{split}/{class_names[int(counts.argmin())]}: none of its images can be decoded")


def vector_columns(config: DataConfig) -> tuple[int, tuple[str, ...] | None] | None:
    """Return the number of values of a vector, and their names if known; None for images. Images are not prepared."""
    prepared = prepare(config) if config.name in (*VECTOR_SETS, "own") else None
    return (len(prepared.about["mean"]), columns_of(prepared)) if prepared and holds_vectors(prepared) else None


def columns_of(prepared: Prepared) -> tuple[str, ...] | None:
    names = prepared.about.get("columns")
    return None if names is None else tuple(names)


def holds_vectors(prepared: Prepared) -> bool:
    return VECTORS in (prepared.about.get("kind"), prepared.about.get("inputs"))


def whole_split(prepared: Prepared, name: str, config: DataConfig | None) -> Split:
    """Return all inputs of a split. config: None if only labels are needed."""
    labels_R = torch.from_numpy(prepared.array(f"{name}_labels"))
    num_classes = len(prepared.about["class_names"])
    if not 0 <= labels_R.min() <= labels_R.max() < num_classes:
        raise ValueError(f"{name}: labels from {labels_R.min()} to {labels_R.max()}, of {num_classes} classes")
    inputs_R = None if config is None else inputs_of(prepared, name, config)
    corrupt = [row for row, *_ in prepared.about.get("corrupt", {}).get(name, [])]
    if not corrupt:
        return Split(inputs_R, labels_R)
    rows_N = torch.from_numpy(np.delete(np.arange(len(labels_R)), corrupt))
    return Split(inputs_R, labels_R[rows_N], rows_N)


def inputs_of(prepared: Prepared, name: str, config: DataConfig) -> Tensor | Encoded | Items:
    kind = prepared.about.get("kind", IMAGES)
    if kind in OPENED:
        return OPENED[kind](prepared, name, config)
    return torch.from_numpy(prepared.array(f"{name}_{kind}"))


def part(whole: Split, chosen_N: Tensor) -> Split:
    """Return some rows of a split, with the first view of a frozen trunk's outputs, which evaluation reads."""
    rows_N = chosen_N if whole.rows_N is None else whole.rows_N[chosen_N]
    outputs_N = None if whole.outputs_N is None else whole.outputs_N[:, :1][chosen_N]
    return Split(whole.inputs_R, whole.labels_N[chosen_N], rows_N, outputs_N)


def holdout(labels_N: Tensor, config: DataConfig) -> tuple[Tensor, Tensor]:
    """Return rows for training and for validation, stratified by class and independent of the run's seed."""
    held_N = torch.zeros_like(labels_N, dtype=torch.bool)
    if config.split == "holdout":
        counts_K = labels_N.bincount()
        wanted_K = counts_K * share_held_out(config, len(labels_N))
        # auto rounds up, so that every class has a held-out input, and all classes together have enough.
        rounded_K = (wanted_K - 1e-4).ceil() if config.val_fraction == "auto" else wanted_K.round()
        held_K = rounded_K.long().clamp(max=counts_K - 1)
        if held_K.sum() > MOST_HELD_OUT:
            held_K = (counts_K * (MOST_HELD_OUT / len(labels_N))).long()
        shuffled_N = torch.randperm(len(labels_N), generator=generator("cpu", config.split_seed, "split"))
        held_N[shuffled_N] = place_in_class(labels_N[shuffled_N]) < held_K[labels_N[shuffled_N]]
        if not held_N.any():
            raise ValueError(
                f"data.val_fraction={config.val_fraction} of at most {counts_K.max()} inputs per class holds out none: "
                "write a larger one, or data.split=full"
            )
    train_rows, val_rows = (~held_N).nonzero().flatten(), held_N.nonzero().flatten()
    if config.train_limit is not None:
        train_rows = train_rows[some_of_each(labels_N[train_rows], config.train_limit)]
    return train_rows, val_rows


def share_held_out(config: DataConfig, num_inputs: int) -> float:
    """Return data.val_fraction; for `auto`, a share of num_inputs that is large enough for calibration."""
    if not isinstance(config.val_fraction, str):
        return config.val_fraction
    wanted = max(min(AUTO_SHARE * num_inputs, AUTO_ENOUGH), AUTO_OF_MANY * num_inputs)
    if 2 * AUTO_LEAST <= num_inputs:  # otherwise more than half would be held out
        wanted = max(wanted, AUTO_LEAST)
    return wanted / num_inputs


def most_held_out(config: DataConfig, num_train: int, num_held: int) -> int:
    """Return how many held-out inputs are used (data.val_limit). num_train: training inputs before data.train_limit."""
    if config.val_limit != "auto":
        return num_held if config.val_limit is None else int(config.val_limit)
    share = min(1.0, (config.train_limit or num_train) / num_train)
    return max(LEAST_HELD_OUT, round(share * num_held))


def limited(whole: Split, most: int | None) -> Split:
    """Return at most `most` inputs, balanced over classes as far as possible."""
    return whole if most is None or most >= len(whole) else part(whole, some_of_each(whole.labels_N, most))


def some_of_each(labels_N: Tensor, most: int) -> Tensor:
    """Return at most `most` positions, in order, balanced over classes as far as possible."""
    return place_in_class(labels_N).argsort(stable=True)[:most].sort().values


def place_in_class(labels_N: Tensor) -> Tensor:
    """Return for each input the number of earlier inputs of its class."""
    order_N = labels_N.argsort(stable=True)
    counts_K = labels_N.bincount()
    first_K = counts_K.cumsum(0) - counts_K
    place_N = torch.empty_like(labels_N)
    place_N[order_N] = torch.arange(len(labels_N)) - first_K[labels_N[order_N]]
    return place_N
