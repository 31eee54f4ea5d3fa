"""ResNets for 32x32 images (He et al., 2016): a 3x3 stem, then stages of 16, 32 and 64 planes."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.networks.network import GlobalPool, Network, conv


class Block(nn.Module):
    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.residual(x_BCHW) + self.shortcut(x_BCHW), inplace=True)


def resnet(channels: int, blocks: int, bottleneck: bool = False) -> Network:
    """Build a ResNet with `blocks` in each of its three stages: 1, 3 and 5 basic blocks make ResNet-8, -20 and -32.

    The ResNet-110 of the paper (D=256, 1.73 M parameters) has 18 bottleneck blocks per stage, although its name
    suggests 12. The ResNet-110 of Chen et al. and Wu and Gong, 2020, whose figures the paper quotes, has 12 (1.17 M).
    """
    expansion = 4 if bottleneck else 1
    stem = nn.Sequential(conv(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    stage_1 = _stage(16, 16, blocks, 1, bottleneck)
    stage_2 = _stage(16 * expansion, 32, blocks, 2, bottleneck)
    stage_3 = _stage(32 * expansion, 64, blocks, 2, bottleneck)
    return Network(
        trunk=nn.Sequential(stem, stage_1, stage_2),
        tail=nn.Sequential(stage_3, GlobalPool(), nn.Flatten()),
        feature_dim=64 * expansion,
        trunk_dim=32 * expansion,
    )


def _stage(inputs: int, planes: int, blocks: int, stride: int, bottleneck: bool) -> nn.Sequential:
    residual = _bottleneck if bottleneck else _basic
    outputs = planes * (4 if bottleneck else 1)
    shortcut: nn.Module = nn.Identity()
    if stride != 1 or inputs != outputs:
        shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    first = Block(residual(inputs, planes, stride), shortcut)
    return nn.Sequential(first, *(Block(residual(outputs, planes, 1), nn.Identity()) for _ in range(blocks - 1)))


def _basic(inputs: int, planes: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, planes, 3, stride),
        nn.BatchNorm2d(planes),
        nn.ReLU(inplace=True),
        conv(planes, planes, 3),
        nn.BatchNorm2d(planes),
    )


def _bottleneck(inputs: int, planes: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, planes, 1),
        nn.BatchNorm2d(planes),
        nn.ReLU(inplace=True),
        conv(planes, planes, 3, stride),
        nn.BatchNorm2d(planes),
        nn.ReLU(inplace=True),
        conv(planes, 4 * planes, 1),
        nn.BatchNorm2d(4 * planes),
    )


NETWORKS = {
    "resnet8": partial(resnet, blocks=1),
    "resnet20": partial(resnet, blocks=3),
    "resnet32": partial(resnet, blocks=5),
    "resnet110": partial(resnet, blocks=18, bottleneck=True),
    "resnet110_12": partial(resnet, blocks=12, bottleneck=True),
}
