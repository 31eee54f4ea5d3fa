"""Networks small enough to keep a run with them as a file in the repository."""

from torch import nn


class Small(nn.Module):
    """[B, 3, 32, 32] -> [B, 4]."""

    def __init__(self):
        super().__init__()
        self.feature_dim = 4
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, images):
        return self.layers(images).flatten(1)


class Normless(nn.Module):
    """A network without any norm, that draws (dropout) and can be branched: [B, 3, H, W] -> [B, 6]."""

    def __init__(self):
        super().__init__()
        self.feature_dim, self.trunk_dim = 6, 4
        self.trunk = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.Tanh(), nn.Dropout(0.2))
        self.tail = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Plain(Normless):
    """The same without dropout."""

    def __init__(self):
        super().__init__()
        self.trunk = self.trunk[:2]
