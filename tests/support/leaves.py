"""A Dataset as a user would write it: leaves of two kinds, drawn when they are asked for."""

import numpy as np
from torch.utils.data import Dataset


class Leaves(Dataset):
    """data.root says how many there are for training; for the test there are 48."""

    class_names = ["elm", "oak"]

    def __init__(self, split, root):
        self.labels = np.arange(int(root) if split == "train" else 48) % 2
        self.shift = 0 if split == "train" else 10**6

    def __len__(self):
        return len(self.labels)

    def drawn(self, index, *shape):
        return np.random.default_rng(index + self.shift).integers(0, 200, shape, dtype=np.uint8)

    def __getitem__(self, index):
        return self.drawn(index, 20, 24, 3) + np.uint8(40) * np.uint8(self.labels[index]), int(self.labels[index])


class Measured(Leaves):
    """The same as vectors."""

    def __getitem__(self, index):
        return self.drawn(index, 128).astype(np.float32) + 30 * self.labels[index], int(self.labels[index])
