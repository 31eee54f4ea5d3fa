"""Pre-activation ResNets of bottleneck blocks for 32x32 images: PreResNet-110 of Ashukha et al., 2020.

It has 12 blocks in each of its three stages, and 1.17 M parameters for 100 classes.
"""

from functools import partial

from torch import Tensor, nn

from dicedist.algorithm.networks.network import GlobalPool, Network, conv

EXPANSION = 4


class PreActivationBottleneck(nn.Module):
    """A bottleneck block. Its projection shortcut reads the raw input, unlike the one of a wide ResNet."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * planes
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            conv(inputs, planes, 1),
            nn.BatchNorm2d(planes),
            nn.ReLU(inplace=True),
            conv(planes, planes, 3, stride),
            nn.BatchNorm2d(planes),
            nn.ReLU(inplace=True),
            conv(planes, outputs, 1),
        )
        self.shortcut = conv(inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.residual(x_BCHW) + self.shortcut(x_BCHW)


def preresnet(channels: int, blocks: int) -> Network:
    widths = [EXPANSION * planes for planes in (16, 32, 64)]
    return Network(
        trunk=nn.Sequential(conv(channels, 16, 3), _stage(16, 16, blocks, 1), _stage(widths[0], 32, blocks, 2)),
        tail=nn.Sequential(
            _stage(widths[1], 64, blocks, 2),
            nn.BatchNorm2d(widths[2]),
            nn.ReLU(inplace=True),
            GlobalPool(),
            nn.Flatten(),
        ),
        feature_dim=widths[2],
        trunk_dim=widths[1],
    )


def _stage(inputs: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    first = PreActivationBottleneck(inputs, planes, stride)
    rest = (PreActivationBottleneck(EXPANSION * planes, planes, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


NETWORKS = {"preresnet110": partial(preresnet, blocks=12)}
