"""Everything about an ensemble except its weights, in types that JSON can hold: exported files carry it as text."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from dicedist.data.sources import Source

VECTORS = "vectors"
PREPARATION = "the short side is scaled to `size` by bilinear interpolation, and the middle square is taken"


@dataclass(frozen=True)
class About:
    run: str
    step: int
    members: list[int]  # their numbers in the run
    networks: list[str]  # one per member
    target: str | None  # the user's own network class, used for all members
    trunk: str | None  # the network whose trunk the branches share
    compared: list[int]  # indices into `members` of those that w compares; empty: there is no w
    conditional: bool  # whether w reads the class
    class_names: list[str]
    mean: list[float]  # of images scaled to 0..1, or of each value of a vector
    std: list[float]
    size: int  # pixels of a side
    images: str  # uint8 [N, H, W, 3] | float [N, 3, H, W] in 0..1 | vectors: float [N, V]
    average: str  # logits | probabilities
    temperature: float
    calibration: dict[str, Any] | None = None  # `Calibration`; None: nothing was chosen on held-out images
    preparation: str = PREPARATION  # how training and predict bring images of other sizes to `size`
    options: dict[str, Any] | None = None  # of the networks: width, depth, ...
    columns: list[str] | None = None  # the names of a vector's values, where training read them from a table
    fusion: dict[str, Any] | None = None  # of a method with a fused classifier: its term, and the sizes of members

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str, origin: Path) -> Self:
        """ValueError if the text is of another version of dicedist, or no ensemble's at all."""
        try:
            values: dict[str, Any] = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(not_ours(origin)) from error
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if differing := sorted((needed - values.keys()) | (values.keys() - known)):
            raise ValueError(
                f"{origin} was exported by another version of dicedist (they differ in {', '.join(differing)}): "
                "export the run again"
            )
        return cls(**values)

    def of(self, places: Sequence[int]) -> "About":
        """Describe the members at these places. Nothing was fitted to them: confidences are not calibrated."""
        whole = list(places) == list(range(len(self.members)))
        known_to_w = [new for new, old in enumerate(places) if old in self.compared]
        return replace(
            self,
            members=[self.members[place] for place in places],
            networks=[self.networks[place] for place in places],
            compared=known_to_w if len(known_to_w) > 1 else [],
            temperature=self.temperature if whole else 1.0,
            calibration=self.calibration if whole else None,
            fusion=self.fusion if whole else None,
        )


def described(source: Source) -> dict[str, Any]:
    """The fields of About that the data give."""
    found = {name: list(getattr(source, name)) for name in ("class_names", "mean", "std")}
    return found | ({"columns": list(source.columns)} if source.columns is not None else {})


def not_ours(path: Path) -> str:
    return f"{path} is not an ensemble that dicedist.export wrote"
