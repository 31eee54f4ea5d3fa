"""Networks written elsewhere: torchvision's and timm's by name, the user's own class by its import path."""

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from dicedist.algorithm.networks.network import Network


class Unsplit(Network):
    """A network without a split point. It can be a net but not a branch: asking for its trunk raises an error."""

    def __init__(self, body: nn.Module, feature_dim: int, name: str) -> None:
        nn.Module.__init__(self)
        self.body = body
        self.feature_dim = feature_dim
        self.name = name

    def read(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.body(images_BCHW), None

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("trunk", "tail", "trunk_dim"):
            raise ValueError(
                f"{self.name} has no split point: write structure=net (and a method without gate), or a "
                "network._target_ with trunk, tail and trunk_dim"
            )
        return super().__getattr__(attribute)


def from_torchvision(name: str) -> Network:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ValueError(f"torchvision has no classification model {name!r}: write network.name=torchvision/resnet18")
    model = models.get_model(name, weights=None)
    dense = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not dense:
        raise ValueError(
            f"torchvision/{name} does not end in a dense layer: wrap it in a class and name that by network._target_"
        )
    feature_dim = model.get_submodule(dense[-1]).in_features
    model.set_submodule(dense[-1], nn.Identity())
    return Unsplit(model, feature_dim, f"torchvision/{name}")


def from_timm(name: str) -> Network:
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise ValueError(f"timm/{name} needs timm: pip install timm") from error
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}: timm.list_models() names them")
    model = timm.create_model(name, pretrained=False, num_classes=0)
    return Unsplit(model, getattr(model, "head_hidden_size", model.num_features), f"timm/{name}")


def from_target(target: str, trusted: bool) -> Network:
    """Runs the user's code, hence `trusted`: loading someone else's config must not execute anything."""
    if not trusted:
        raise ValueError(f"network._target_={target} runs its code: add network.trusted=true if you trust it")
    module, _, attribute = target.rpartition(".")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import network._target_={target}: {error}") from error
    network = factory()
    if isinstance(network, Network):
        return network
    if not isinstance(getattr(network, "feature_dim", None), int):
        raise ValueError(f"{target} has no feature_dim: set self.feature_dim to the number of features that it returns")
    if not hasattr(network, "trunk") and not hasattr(network, "tail"):
        return Unsplit(network, network.feature_dim, target)
    for part in ("trunk", "tail", "trunk_dim"):
        if not hasattr(network, part):
            raise ValueError(f"{target} has no {part}: a network that can be branched sets trunk, tail and trunk_dim")
    return Network(network.trunk, network.tail, network.feature_dim, network.trunk_dim)
