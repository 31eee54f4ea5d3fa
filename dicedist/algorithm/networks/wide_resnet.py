"""Wide ResNets for 32x32 images (Zagoruyko and Komodakis, 2016): pre-activation blocks, widened stages."""

from functools import partial

from torch import Tensor, nn

from dicedist.algorithm.networks.network import GlobalPool, Network, conv


class PreActivationBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.activation = _activation(inputs)
        self.residual = nn.Sequential(conv(inputs, outputs, 3, stride), _activation(outputs), conv(outputs, outputs, 3))
        self.projection = conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        active_BCHW = self.activation(x_BCHW)
        # A projection shortcut reads the activated input, an identity shortcut the raw one.
        shortcut_BCHW = x_BCHW if self.projection is None else self.projection(active_BCHW)
        return self.residual(active_BCHW) + shortcut_BCHW


def wide_resnet(channels: int, blocks: int, widen: int) -> Network:
    """Build a wide ResNet with `blocks` in each of its three stages: WRN-28-2 has 4, widened by 2."""
    widths = [16 * widen, 32 * widen, 64 * widen]
    stem = conv(channels, 16, 3)
    return Network(
        trunk=nn.Sequential(stem, _stage(16, widths[0], blocks, 1), _stage(widths[0], widths[1], blocks, 2)),
        tail=nn.Sequential(
            _stage(widths[1], widths[2], blocks, 2),
            _activation(widths[2]),
            GlobalPool(),
            nn.Flatten(),
        ),
        feature_dim=widths[2],
        trunk_dim=widths[1],
    )


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = PreActivationBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(PreActivationBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def _activation(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


NETWORKS = {"wrn28_2": partial(wide_resnet, blocks=4, widen=2)}
