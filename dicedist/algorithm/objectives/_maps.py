"""The last map before pooling as a field, shared by FFL and AFD: every member sends channels x rows x columns floats.

Legend: B inputs, C channels, H rows, W columns, X = C H W.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation

MapShape = tuple[int, int, int]  # C, H, W


class OnMaps(Distillation):
    asks_maps = True

    def fields(self, view: View) -> Fields:
        assert view.own.map_BCHW is not None
        return {"map": view.own.map_BCHW.flatten(1)}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {"map": [math.prod(shape) for shape in map_shapes(sizes)]}


def map_shapes(sizes: Sequence[Sizes]) -> list[MapShape]:
    shapes = [size.map for size in sizes if size.map is not None]
    assert len(shapes) == len(sizes)  # build.check_members
    return shapes


def unflattened(map_BX: Tensor, shape: MapShape) -> Tensor:
    """A received map may be padded behind its own values, as the narrower of two fields is."""
    return map_BX[:, : math.prod(shape)].unflatten(1, shape)
