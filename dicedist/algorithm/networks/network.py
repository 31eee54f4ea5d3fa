"""The shape of every network: a trunk that branches may share, then a tail of the member, which ends in features.

The pooling at the end of a tail has no weights and is a module of its own, so that methods can read the last map.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.networks.layers import Layers, layers


@dataclass(frozen=True)
class Inputs:
    """The images on which the published weights of a network were trained: scaled to 0..1, then normalized."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int


@dataclass(frozen=True)
class Origin:
    """Facts about a network that was written elsewhere."""

    library: str = ""  # torchvision or timm; empty for networks of dicedist and of the user
    head: tuple[str, ...] = ()  # the name of the classifier, which published weights contain
    inputs: Inputs | None = None
    layers: Layers = ()  # under their published names, before the network was split
    undecayed: frozenset[str] = frozenset()  # parameters without weight decay, in addition to norms and biases


INSIDE = "at_larger_size."  # in the names of parameters of `Enlarged`


class Enlarged(nn.Module):
    """The first layers of a network, fed with enlarged images (CIFAR) for weights that were trained on larger ones."""

    def __init__(self, inside: nn.Module, size: int):
        super().__init__()
        self.at_larger_size, self.size = inside, size

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.at_larger_size(F.interpolate(images_BCHW, (self.size, self.size), mode="bilinear"))


class Outputs(NamedTuple):
    features_BD: Tensor
    trunk_BCHW: Tensor | None  # the output of the trunk (for a branch, its input); None without a split point
    map_BCHW: Tensor | None  # the last map before pooling; None if the network has none


class Network(nn.Module):
    """Maps images [B, C, H, W] or vectors [B, V] to features [B, feature_dim]; the classifier belongs to the member.

    The output of the trunk is [B, trunk_dim, h, w], or [B, trunk_dim] for vectors. For other shapes trunk_dim is 0.
    Several tails may read this output, so no tail may overwrite it in place.
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
        """Return the part that a member owns if the trunk is shared: a network that reads the output of the trunk."""
        own = Network(nn.Identity(), self.tail, self.feature_dim, self.trunk_dim, self.origin)
        own.pool, own.projection = self.pool, self.projection
        return own

    def enlarge(self, size: int) -> None:
        self.trunk = Enlarged(self.trunk, size)

    @property
    def extractor(self) -> list[nn.Parameter]:
        """Return the parameters behind the last map that are not frozen."""
        halves = (*self.trunk.parameters(), *self.tail.parameters())
        return [parameter for parameter in halves if parameter.requires_grad]

    def layers(self) -> list[list[str]]:
        """Return the names of the parameters, layer by layer, without the projection."""
        names = [name for name, _ in self.named_parameters() if not name.startswith("projection.")]
        if not self.origin.library:
            return [kept for layer in layers(self) if (kept := [name for name in layer if name in names])]
        ours = {self.published_name(name): name for name in names}
        return [kept for layer in self.origin.layers if (kept := [ours[name] for name in layer if name in ours])]

    def published_name(self, name: str) -> str:
        """Return the published name of a tensor. Published weights know neither trunk nor tail."""
        name = name.replace(INSIDE, "", 1)
        return name.partition(".")[2] if self.origin.library else name

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that timm exempts from weight decay."""
        return {name for name, _ in self.named_parameters() if self.published_name(name) in self.origin.undecayed}


def unpooled(tail: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Split a tail into the modules up to its last map, and its pooling; None if it has no pooling without weights."""
    layers = tail if isinstance(tail, nn.Sequential) else nn.Sequential()
    pools = [place for place, layer in enumerate(layers) if isinstance(layer, nn.AdaptiveAvgPool2d)]
    if not pools or layers[pools[-1] :].state_dict():
        return tail, None
    return layers[: pools[-1]], layers[pools[-1] :]


def project(network: Network, feature_dim: int) -> None:
    """Put a dense layer and a norm behind the features, so that the network has feature_dim features."""
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    norm = nn.BatchNorm1d(feature_dim) if has_batch_norm else nn.LayerNorm(feature_dim)
    network.projection = nn.Sequential(nn.Linear(network.feature_dim, feature_dim), norm)
    network.feature_dim = feature_dim


class GlobalPool(nn.AdaptiveAvgPool2d):
    """The mean over all pixels. The pooling of torch changes strides, which costs two more kernels in backward."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, map_BCHW: Tensor) -> Tensor:
        return map_BCHW.mean((2, 3), keepdim=True)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the size at stride 1, without bias (a batch norm follows), He-initialized."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
