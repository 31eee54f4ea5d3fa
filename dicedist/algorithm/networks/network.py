"""The shape of every network: a trunk that branches may share, then the member's own tail, which ends in features."""

from torch import Tensor, nn


class Network(nn.Module):
    """Maps images [B, 3, H, W] to features [B, feature_dim]; the classifier belongs to the member.

    The trunk's output is [B, trunk_dim, h, w]. Several tails may read it, so a tail must not write to it in place.
    """

    def __init__(self, trunk: nn.Module, tail: nn.Module, feature_dim: int, trunk_dim: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.tail = tail
        self.feature_dim = feature_dim
        self.trunk_dim = trunk_dim

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.read(images_BCHW)[0]

    def read(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """The features, and the trunk's output that they were read from."""
        shared_BCHW = self.trunk(images_BCHW)
        return self.tail(shared_BCHW), shared_BCHW

    def branch(self) -> "Network":
        """The member's own part when the trunk is shared: a network that reads the trunk's output."""
        return Network(nn.Identity(), self.tail, self.feature_dim, self.trunk_dim)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """No bias (a batch norm follows), size kept at stride 1, He initialisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
