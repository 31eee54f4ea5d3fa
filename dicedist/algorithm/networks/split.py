"""Cut any network behind one of its modules: into a trunk that branches may share, and a tail.

The forward pass is traced down to the split point; all other modules stay whole. Both halves keep the names of their
parameters.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call

Options = Mapping[fx.Node, Any]  # arguments of a forward other than the images -> their defaults


class Tracer(fx.Tracer):
    """Trace only into the modules that contain the split point."""

    def __init__(self, at: str, opaque: Collection[Callable[..., Any]]):
        super().__init__(autowrap_functions=tuple(opaque))
        self.at = at

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return not self.at.startswith(f"{path}.")


def cut(
    model: nn.Module, at: str, name: str, opaque: Collection[Callable[..., Any]] = ()
) -> tuple[nn.Module, nn.Module]:
    """Trace a network and cut it behind the module `at`. name: for messages. opaque: functions that stay whole."""
    if at not in dict(model.named_modules()):
        raise ValueError(
            f"network.split={at}: {name} has no such module, write one of {', '.join(split_points(model))}"
        )
    try:
        _, *others = inspect.signature(model.forward).parameters.values()  # all but the images keep their defaults
        graph = Tracer(at, opaque).trace(model, concrete_args={option.name: option.default for option in others})
    except Exception as error:  # a forward pass may do anything with its proxies
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"network.split={at}: {name} cannot be traced ({reason}); write structure=net") from error
    found = [node for node in graph.nodes if node.op == "call_module" and node.target == at]
    if len(found) != 1:
        raise ValueError(
            f"network.split={at}: {name} runs it {len(found)} times, write one of {', '.join(split_points(model))}"
        )
    _, *placeholders = (node for node in graph.nodes if node.op == "placeholder")
    options = {node: option.default for node, option in zip(placeholders, others, strict=True)}
    return first_half(model, graph, found[0], options), second_half(model, graph, found[0], options, name)


def first_half(model: nn.Module, graph: fx.Graph, end: fx.Node, options: Options) -> fx.GraphModule:
    half = fx.Graph()
    copies: dict[fx.Node, Any] = {**options}
    for node in graph.nodes:
        if node not in copies:
            copies[node] = half.node_copy(node, copies.__getitem__)
        if node is end:
            half.output(copies[node])
            break
    return fx.GraphModule(model, half)


def second_half(model: nn.Module, graph: fx.Graph, start: fx.Node, options: Options, name: str) -> fx.GraphModule:
    half, behind = fx.Graph(), False
    shared = half.placeholder("shared")
    copies: dict[fx.Node, Any] = {**options, start: shared}

    def known(node: fx.Node) -> Any:
        if node not in copies and node.op == "get_attr":
            copies[node] = half.node_copy(node)
        if node not in copies:
            raise ValueError(
                f"network.split={start.target}: what follows in {name} also reads {node.name}, which comes before; "
                f"write one of {', '.join(split_points(model))}"
            )
        return copies[node]

    for node in graph.nodes:
        if behind:
            copies[node] = half.node_copy(node, known)
        behind = behind or node is start
    tail = fx.GraphModule(model, half)
    for user in shared.users:  # several tails read the trunk's output
        if user.op == "call_module":
            for module in tail.get_submodule(str(user.target)).modules():
                if getattr(module, "inplace", False):
                    module.inplace = False  # type: ignore[assignment]
    return tail


def split_points(model: nn.Module) -> list[str]:
    """Return the split points that timm names; else the top modules with weights, and the stages inside them."""
    named: Any = getattr(model, "feature_info", None)
    if isinstance(named, list) and named:
        return [entry["module"] for entry in named if "module" in entry]
    points = []
    for name, child in model.named_children():
        inner = [f"{name}.{below}" for below, _ in child.named_children()] if len(list(model.children())) < 4 else []
        points += inner or [name]
    return [point for point in points if any(True for _ in model.get_submodule(point).parameters())]


def width_of(trunk: nn.Module, channels: int, size: int) -> int:
    """Return the channels of a trunk's output [B, C, h, w], without computing it; 0 for other shapes."""
    # Not with torch's fake tensors: they start autograd threads, and a process with such threads cannot be forked.
    tensors = {name: value.to("meta") for name, value in (*trunk.named_parameters(), *trunk.named_buffers())}
    with torch.no_grad():
        shape = functional_call(trunk, tensors, torch.empty(2, channels, size, size, device="meta")).shape
    return shape[1] if len(shape) == 4 and shape[2] == shape[3] else 0  # swin has its channels last
