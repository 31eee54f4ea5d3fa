"""The layers of any network, in order. Learning rates may fall towards the images, and first layers may be frozen."""

from collections.abc import Collection, Sequence

from torch import nn

Layers = Sequence[Collection[str]]  # names of parameters, layer by layer from the images on


def layers(network: nn.Module) -> list[list[str]]:
    """Return the names of the parameters of a network, layer by layer.

    A layer is an element of a sequence: a block of a ViT, a block in a stage of a ResNet, a stage of a ConvNeXt. The
    modules between such elements form layers too: the stem with positions and tokens, the last norm.
    """
    found: list[tuple[bool, list[str]]] = []  # is it an element of a sequence? and its parameters

    def add(element: bool, names: list[str]) -> None:
        if names and (element or not found or found[-1][0]):
            found.append((element, []))
        if names:
            found[-1][1].extend(names)

    def walk(module: nn.Module, path: str) -> None:
        add(False, [path + name for name, _ in module.named_parameters(recurse=False)])
        for name, child in module.named_children():
            inside = f"{path}{name}."
            if is_sequence(module) and not is_sequence(child) and any(True for _ in child.children()):
                add(True, [inside + own for own, _ in child.named_parameters()])
            else:
                walk(child, inside)

    walk(network, "")
    return [names for _, names in found]


def is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)
