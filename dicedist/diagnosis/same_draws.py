"""The same random numbers on every device, so that a step on a GPU can be compared with one on the CPU."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm}


class SameDraws(TorchFunctionMode):
    """Inside the context, draws of a keyed GPU generator are made on the CPU from its seed, and copied.

    Use it for comparisons only: it is slow, because every draw waits for the copy. Draws inside layers (dropout) do not
    change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twins: WeakKeyDictionary[torch.Generator, torch.Generator] = WeakKeyDictionary()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        drawn_from = named.get("generator")
        if function not in DRAWING or drawn_from is None or drawn_from.device.type == "cpu":
            return function(*arguments, **named)
        twin = self.twins.setdefault(drawn_from, torch.Generator().manual_seed(drawn_from.initial_seed()))
        drawn = function(*arguments, **{**named, "generator": twin, "device": "cpu"})
        return drawn.to(named.get("device") or drawn_from.device)
