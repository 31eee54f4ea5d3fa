"""Networks written elsewhere: of torchvision and timm by name, of the user by import path."""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dicedist.algorithm.networks.layers import layers
from dicedist.algorithm.networks.network import INSIDE, Enlarged, Inputs, Network, Origin, Outputs
from dicedist.algorithm.networks.split import cut, split_points, width_of
from dicedist.config.schema import RGB
from dicedist.config.targets import resolve


class Unsplit(Network):
    """A network without a split point. It can be a net but not a branch: asking for its trunk raises an error."""

    def __init__(self, body: nn.Module, feature_dim: int, name: str, origin: Origin | None = None) -> None:
        nn.Module.__init__(self)
        self.body = body
        self.pool = self.projection = None
        self.feature_dim = feature_dim
        self.name = name
        self.origin = origin or Origin()

    def outputs(self, images_BCHW: Tensor) -> Outputs:
        return Outputs(self.projected(self.body(images_BCHW)), None, None)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("trunk", "tail", "trunk_dim"):
            named = [point.removeprefix(INSIDE) for point in split_points(self.body)]
            points = f"network.split={' | '.join(named)}, or " if self.origin.library else ""
            raise ValueError(
                f"{self.name} has no split point: write {points}structure=net (and a method without gate), or a "
                "network._target_ with trunk, tail and trunk_dim"
            )
        return super().__getattr__(attribute)

    def published_name(self, name: str) -> str:
        return name.replace(INSIDE, "", 1).partition(".")[2]  # without body

    def enlarge(self, size: int) -> None:
        self.body = Enlarged(self.body, size)

    def as_trunk(self) -> "AllTrunk":
        return AllTrunk(self.body, nn.Identity(), self.feature_dim, self.feature_dim, self.origin)


class AllTrunk(Network):
    """A network without a split point that branches share as a whole. A member owns the head behind its features."""

    def published_name(self, name: str) -> str:
        return name.replace(INSIDE, "", 1).partition(".")[2]  # without trunk


def from_torchvision(name: str, split: str | None, channels: int) -> Network:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ValueError(f"torchvision has no classification model {name!r}: write network.name=torchvision/resnet18")
    model = models.get_model(name, weights=None)
    if channels != RGB:
        read_channels(model, channels)
    dense = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not dense:
        raise ValueError(
            f"torchvision/{name} does not end in a dense layer: wrap it in a class, and name it by network._target_"
        )
    feature_dim = model.get_submodule(dense[-1]).in_features
    model.set_submodule(dense[-1], nn.Identity())
    shown = models.get_model_weights(name).DEFAULT.transforms()
    inputs = Inputs(colors(shown.mean), colors(shown.std), shown.crop_size[0])
    origin = Origin("torchvision", (dense[-1],), inputs, layers(model))
    return halved(model, feature_dim, f"torchvision/{name}", split, channels, origin)


def from_timm(name: str, split: str | None, channels: int) -> Network:
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise ValueError(f"timm/{name} needs timm: pip install 'dicedist[timm]'") from error
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}: timm.list_models() names them")
    model = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels)
    about: Mapping[str, Any] = model.pretrained_cfg
    spared: Collection[str] = getattr(model, "no_weight_decay", set)()
    head = about.get("classifier") or ()
    origin = Origin(
        "timm",
        (head,) if isinstance(head, str) else tuple(head),
        Inputs(colors(about["mean"]), colors(about["std"]), about["input_size"][-1]),
        layers(model),
        frozenset(spared),
    )
    width, opaque = getattr(model, "head_hidden_size", model.num_features), timm.models.get_notrace_functions()
    return halved(model, width, f"timm/{name}", split, channels, origin, opaque)


def read_channels(model: nn.Module, channels: int) -> None:
    """Let the first convolution of a network for RGB images read another number of channels."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.in_channels = channels
    first.weight = nn.Parameter(adapted(first.weight.detach(), channels))


def adapted(weight_OCHW: Tensor, channels: int) -> Tensor:
    """Return a first layer for another number of channels, made from the layer for RGB, as timm does it.

    One channel: the sum over the colors, so that a gray image gives the same output as its RGB copy. Other numbers:
    the colors in turn, scaled so that equal values in all channels give the same sum.
    """
    if channels == 1:
        return weight_OCHW.sum(1, keepdim=True)
    return weight_OCHW[:, torch.arange(channels) % RGB] * (RGB / channels)


def colors(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue


def halved(
    model: nn.Module,
    feature_dim: int,
    name: str,
    split: str | None,
    channels: int,
    origin: Origin,
    opaque: Collection[Callable[..., Any]] = (),
) -> Network:
    if split is None:
        return Unsplit(model, feature_dim, name, origin)
    assert origin.inputs is not None
    trunk, tail = cut(model, split, name, opaque)
    return Network(trunk, tail, feature_dim, width_of(trunk, channels, origin.inputs.size), origin)


def from_target(target: str, trusted: bool, input_shape: tuple[int, ...]) -> Network:
    """Build a network by the class or function of the user, which takes no arguments."""
    built = resolve("network", target, trusted)()
    if isinstance(built, Network):
        return built
    if not isinstance(built, nn.Module):
        raise ValueError(f"{target} returns {type(built).__name__}: return a torch.nn.Module that returns features")
    network: Any = built
    if not isinstance(getattr(network, "feature_dim", None), int):
        network.feature_dim = measured_width(network, target, input_shape)
    if not hasattr(network, "trunk") and not hasattr(network, "tail"):
        return Unsplit(network, network.feature_dim, target)
    for part in ("trunk", "tail", "trunk_dim"):
        if not hasattr(network, part):
            raise ValueError(f"{target} has no {part}: a network that can be branched sets trunk, tail and trunk_dim")
    return Network(network.trunk, network.tail, network.feature_dim, network.trunk_dim)


@torch.no_grad()
def measured_width(network: nn.Module, target: str, input_shape: tuple[int, ...]) -> int:
    """Return the number of features of a network that does not state its feature_dim."""
    was_training = network.training
    try:
        features = network.eval()(torch.zeros(2, *input_shape))
    except Exception as error:  # code of the user may raise anything
        raise ValueError(
            f"{target} does not take inputs of shape {list(input_shape)}: {' '.join(str(error).split())}"
        ) from error
    network.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        found = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"{target} returns {found} for 2 inputs: return features [2, D] (num_classes=0 in timm)")
    return features.shape[1]
