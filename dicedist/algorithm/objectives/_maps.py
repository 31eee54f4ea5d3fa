"""The last map before pooling as a field, shared by FFL and AFD: every member sends channels x rows x columns floats.

Legend: B inputs, C channels, H rows, W columns, X = C H W.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from dicedist.algorithm.member import to_float32
from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.networks import Network
from dicedist.algorithm.objectives import View
from dicedist.algorithm.objectives._distillation import Distillation
from dicedist.algorithm.probes import LastMap
from dicedist.config.schema import Config

MapShape = tuple[int, int, int]  # C, H, W


class OnMaps(Distillation):
    probes = (LastMap,)

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        if any(size.map is None for size in sizes):
            raise ValueError(
                f"method={config.method.name} reads the maps before pooling, but this network does not return them: "
                "write network=resnet32, wrn28_2 or another of dicedist's own for images"
            )

    def fields(self, view: View) -> Fields:
        return {"map": to_float32(view.own.probed["map"]).flatten(1)}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {"map": [math.prod(shape) for shape in map_shapes(sizes)]}


def map_shapes(sizes: Sequence[Sizes]) -> list[MapShape]:
    shapes = [size.map for size in sizes if size.map is not None]
    assert len(shapes) == len(sizes)  # build.check_members
    return shapes


def unflattened(map_BX: Tensor, shape: MapShape) -> Tensor:
    """Return the map [B, C, H, W]; a received map may end with padding."""
    return map_BX[:, : math.prod(shape)].unflatten(1, shape)
