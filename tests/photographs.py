"""Photographs of mixed sizes, for tests and `bench data`: python -m tests.photographs FOLDER NUMBER [SIDE]."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ash", "elm", "oak")


def photograph(rng, path, width, height, **how):
    """Smooth like a photograph, so that JPEG compresses it as one."""
    coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, **how)


def generate(root, number, side=400):
    """Four of five for training; sides from half of `side` to one and a half of it."""
    rng = np.random.default_rng(0)
    for place in range(number):
        folder = root / ("test" if place % 5 == 4 else "train") / CLASSES[place % 3]
        folder.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(side // 2, side + side // 2, 2).tolist()
        photograph(rng, folder / f"{place:06}.jpg", width, height, quality=92)


if __name__ == "__main__":
    generate(Path(sys.argv[1]), *map(int, sys.argv[2:]))
