"""Everything about an ensemble except its weights, in types that JSON can hold: exported files carry it as text."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin

from dicedist.config.schema import AVERAGES, LARGEST_SIZE, MOST_CHANNELS, OOD_SCORES, NetworkConfig
from dicedist.data.sources import Source

VECTORS = "vectors"
# Config keys that change the layers of a network: neither its name nor its code, and no settings of training.
NO_OPTIONS = ("name", "_target_", "trusted", "per_member", "pretrained", "sha256", "freeze")
OPTIONS = {entry.name: entry.type for entry in fields(NetworkConfig) if entry.name not in NO_OPTIONS}
LARGEST_NUMBER = 2**53  # smaller integers are exact as a float
PREPARATION = "the short side is scaled to `size` by bilinear interpolation, and the middle square is taken"


@dataclass(frozen=True)
class About:
    run: str
    step: int
    members: list[int]  # their numbers in the run
    networks: list[str]  # one per member
    target: str | None  # the user's own network class, used for all members
    trunk: str | None  # the network whose trunk the branches share
    compared: list[int]  # indices into `members`: the members that w compares; empty without w
    conditional: bool  # w reads the class
    class_names: list[str]
    mean: list[float]  # of each channel of images scaled to 0..1, or of each value of a vector
    std: list[float]
    size: int  # pixels of a side
    images: str  # uint8 [N, H, W, C] | float [N, C, H, W] in 0..1 | vectors: float [N, V]
    average: str  # logits | probabilities
    temperature: float
    calibration: dict[str, Any] | None = None  # `Calibration`; None: nothing was chosen on held-out images
    ood_score: str | None = None  # see calibration.ood_score; None: DICE x w, without w the largest probability
    preparation: str = PREPARATION  # how training and predict bring images of other sizes to `size`
    options: dict[str, Any] | None = None  # of the networks: width, depth, ...
    columns: list[str] | None = None  # the names of a vector's values, if training read a table
    gives_logits: bool = False  # members were trained elsewhere and end in logits; `target` builds one
    fusion: dict[str, Any] | None = None  # for a method with a fused classifier: its term, and the members' sizes

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str, origin: Path) -> Self:
        """Parse a description. Raise a ValueError if it comes from another version of dicedist, or is none at all."""
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
        about = cls(**values)
        if wrong := misfits(about):
            raise ValueError(f"{not_ours(origin)}: {wrong[0]} is damaged")
        if not about.is_consistent:
            raise ValueError(f"{not_ours(origin)}: its parts contradict each other")
        return about

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, as a network sees it."""
        return (len(self.mean),) if self.images == VECTORS else (len(self.mean), self.size, self.size)

    @property
    def is_consistent(self) -> bool:
        """Return whether the values, whose types are right, are consistent."""
        options, width = self.options or {}, len(self.mean)
        return (
            0 < len(self.members) == len(self.networks)
            and all(place in range(len(self.members)) for place in self.compared)
            and all(deviation > 0 for deviation in self.std)
            and width == len(self.std) > 0
            and (self.images == VECTORS or width <= MOST_CHANNELS)
            and 0 < self.size <= LARGEST_SIZE
            and self.images in ("uint8", "float", VECTORS)
            and self.average in AVERAGES
            and self.ood_score in (None, *OOD_SCORES)
            and self.temperature > 0
            and len(self.class_names) > 1
            and (self.columns is None or len(self.columns) == width)
            and all(key in OPTIONS and fits(value, OPTIONS[key]) for key, value in options.items())
        )

    def of(self, places: Sequence[int]) -> "About":
        """Describe the members at these places. Their confidences are not calibrated."""
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


def misfits(described: Any) -> list[str]:
    """Return the fields of a dataclass, filled from JSON, whose types do not match their declarations."""
    return [entry.name for entry in fields(described) if not fits(getattr(described, entry.name), entry.type)]


def fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has this type. A number must not be huge, and True is not a number."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) < LARGEST_NUMBER
    return kind is Any or type(value) is (NoneType if kind is None else kind)


def described(source: Source) -> dict[str, Any]:
    """Return the fields of About that depend on the data."""
    found = {name: list(getattr(source, name)) for name in ("class_names", "mean", "std")}
    return found | ({"columns": list(source.columns)} if source.columns is not None else {})


def not_ours(path: Path) -> str:
    return f"{path} is not an ensemble that dicedist.export wrote"
