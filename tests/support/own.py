"""Objects of a user: a network, a dataset and a method, in a module that ranks can import."""

import numpy as np
import torch
from torch import nn

from dicedist import Objective


class Features(nn.Module):
    """A backbone that does not say how many features it returns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.layers(images)


class Squares(torch.utils.data.Dataset):
    """Images as torchvision's ToTensor makes them; the first color shows the class."""

    classes = ["dark", "gray", "light"]

    def __init__(self, size=96, seed=0):
        draws = np.random.default_rng(seed)
        self.targets = draws.integers(0, 3, size).tolist()
        self.images = draws.random((size, 3, 16, 16), dtype=np.float32)
        self.images[:, 0] = np.array(self.targets)[:, None, None] * 0.4

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        return torch.from_numpy(self.images[row]), self.targets[row]


class Apart(Objective):
    """Members' predictions repel each other: weight <p_i, mean of the peers' p>."""

    sends = ("logits",)
    min_members = 2

    def __init__(self, weight=0.1):
        self.weight = weight

    def __call__(self, view, now):
        p_MBK = view.rows("logits").softmax(2)
        peers_BK = (p_MBK.sum(0) - p_MBK[view.index]) / (view.num_members - 1)
        return {"apart": self.weight * (p_MBK[view.index] * peers_BK).sum(1).mean()}


class Bottled(Apart):
    def prior_rows(self, num_classes):
        return num_classes
