"""The shape of every network: a trunk that branches may share, then the member's own tail, which ends in features.

What a tail ends with behind its last map, a pooling without weights, is kept apart, so that the map can be read.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.networks.layers import Layers, layers


@dataclass(frozen=True)
class Inputs:
    """The images that a network's published weights were trained on: scaled to 0..1, then normalized."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int


@dataclass(frozen=True)
class Origin:
    """Facts about a network that was written elsewhere."""

    library: str = ""  # torchvision, timm; empty: the network is ours, or the user's
    head: tuple[str, ...] = ()  # the name of the classifier, which published weights contain
    inputs: Inputs | None = None
    layers: Layers = ()  # under their published names, before the network was split
    undecayed: frozenset[str] = frozenset()  # parameters without weight decay, in addition to norms and biases


INSIDE = "at_larger_size."  # in the names of parameters of `Enlarged`


class Enlarged(nn.Module):
    """The first layers of a network, shown images of more pixels: CIFAR's, for weights that know larger images."""

    def __init__(self, inside: nn.Module, size: int):
        super().__init__()
        self.at_larger_size, self.size = inside, size

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.at_larger_size(F.interpolate(images_BCHW, (self.size, self.size), mode="bilinear"))


class Outputs(NamedTuple):
    features_BD: Tensor
    trunk_BCHW: Tensor | None  # the output of the trunk; of a branch, its input; None without a split point
    map_BCHW: Tensor | None  # the last map before pooling; None if the network has none


class Network(nn.Module):
    """Maps images [B, C, H, W] or vectors [B, V] to features [B, feature_dim]; the classifier belongs to the member.

    The trunk's output is [B, trunk_dim, h, w], [B, trunk_dim] of vectors, or of another shape, with trunk_dim 0.
    Several tails may read it, so a tail must not write to it in place.
    """

    def __init__(
        self, trunk: nn.Module, tail: nn.Module, feature_dim: int, trunk_dim: int, origin: Origin | None = None
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.tail, self.pool = unpooled(tail)
        self.projection: nn.Module | None = None
        self.feature_dim = feature_dim
        self.trunk_dim = trunk_dim
        self.origin = origin or Origin()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.outputs(images_BCHW).features_BD

    def outputs(self, images_BCHW: Tensor) -> Outputs:
        shared_BCHW = self.trunk(images_BCHW)
        last = self.tail(shared_BCHW)
        if self.pool is None:
            return Outputs(self.projected(last), shared_BCHW, None)
        return Outputs(self.projected(self.pool(last)), shared_BCHW, last)

    def projected(self, features_BD: Tensor) -> Tensor:
        return features_BD if self.projection is None else self.projection(features_BD)

    def branch(self) -> "Network":
        """The member's own part when the trunk is shared: a network that reads the trunk's output."""
        own = Network(nn.Identity(), self.tail, self.feature_dim, self.trunk_dim, self.origin)
        own.pool, own.projection = self.pool, self.projection
        return own

    def enlarge(self, size: int) -> None:
        self.trunk = Enlarged(self.trunk, size)

    @property
    def extractor(self) -> list[nn.Parameter]:
        """The parameters behind the last map, as far as they are not frozen."""
        halves = (*self.trunk.parameters(), *self.tail.parameters())
        return [parameter for parameter in halves if parameter.requires_grad]

    def layers(self) -> list[list[str]]:
        """The names of its parameters, layer by layer; the projection is none of them."""
        names = [name for name, _ in self.named_parameters() if not name.startswith("projection.")]
        if not self.origin.library:
            return [kept for layer in layers(self) if (kept := [name for name in layer if name in names])]
        ours = {self.published_name(name): name for name in names}
        return [kept for layer in self.origin.layers if (kept := [ours[name] for name in layer if name in ours])]

    def published_name(self, name: str) -> str:
        """The name of a tensor in weights of this network that were saved elsewhere: a library knows no halves."""
        name = name.replace(INSIDE, "", 1)
        return name.partition(".")[2] if self.origin.library else name

    def no_weight_decay(self) -> set[str]:
        """The names of parameters that timm's networks exempt from weight decay."""
        return {name for name, _ in self.named_parameters() if self.published_name(name) in self.origin.undecayed}


def unpooled(tail: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """A tail up to its last map, and the pooling that follows; None if the tail does not end in one without weights."""
    layers = tail if isinstance(tail, nn.Sequential) else nn.Sequential()
    pools = [place for place, layer in enumerate(layers) if isinstance(layer, nn.AdaptiveAvgPool2d)]
    if not pools or layers[pools[-1] :].state_dict():
        return tail, None
    return layers[: pools[-1]], layers[pools[-1] :]


def project(network: Network, feature_dim: int) -> None:
    """Put a dense layer and a norm behind the features, so that there are feature_dim of them."""
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    norm = nn.BatchNorm1d(feature_dim) if has_batch_norm else nn.LayerNorm(feature_dim)
    network.projection = nn.Sequential(nn.Linear(network.feature_dim, feature_dim), norm)
    network.feature_dim = feature_dim


class GlobalPool(nn.AdaptiveAvgPool2d):
    """The mean over all pixels. torch's own changes the strides of its result, which costs backward two kernels."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, map_BCHW: Tensor) -> Tensor:
        return map_BCHW.mean((2, 3), keepdim=True)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """No bias (a batch norm follows), size kept at stride 1, He initialization."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
