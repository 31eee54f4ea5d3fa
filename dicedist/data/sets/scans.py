"""Scans of handwritten digits, 8 x 8 pixels in 17 shades: the images of `data=digits`, which come with scikit-learn.

scikit-learn defines no test set. Here it is always the same 540 of the 1,797 scans.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from dicedist.config.schema import DataConfig
from dicedist.data.images import moments
from dicedist.data.prepared import NewArray, Prepared, prepare
from dicedist.data.sets.vectors import carried_file, read_carried

SIZE, NUM_TEST, WHITE = 8, 540, 16


def prepare_scans(config: DataConfig, root: Path) -> Prepared:
    file = carried_file("digits", config.name)

    def build(new_array: NewArray) -> dict[str, Any]:
        table = read_carried("digits", file)
        gray_NHW = (table.vectors_NV * (255 / WHITE)).round().astype(np.uint8).reshape(-1, SIZE, SIZE)
        images_NHWC, labels_N = np.repeat(gray_NHW[..., None], 3, axis=3), np.asarray(table.labels, np.int64)
        order_N = np.argsort(Generator(PCG64(0)).random(len(labels_N)), kind="stable")
        for split, rows in (("test", order_N[:NUM_TEST]), ("train", order_N[NUM_TEST:])):
            new_array(f"{split}_images", images_NHWC[rows].shape, np.uint8)[:] = images_NHWC[rows]
            new_array(f"{split}_labels", rows.shape, np.int64)[:] = labels_N[rows]
        mean, std = moments([images_NHWC[order_N[NUM_TEST:]]])
        return {"class_names": table.class_names, "mean": mean, "std": std}

    return prepare("scans", file.parent, [file, Path(__file__)], build)


SETS = {"scans": prepare_scans}
