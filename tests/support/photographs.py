"""Photographs for tests."""

import numpy as np
from PIL import Image

CLASSES = ("ash", "elm", "oak")


def photograph(rng, path, width, height, **how):
    """Smooth like a photograph, so that JPEG compresses it as one."""
    coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, **how)
