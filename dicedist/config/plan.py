"""The plan of a run: the values that its configuration resolved to, saved with the run and reused on resume."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dicedist.config.schema import Config


@dataclass(frozen=True)
class Plan:
    num_members: int
    input_shape: tuple[int, ...]  # of one input as a network sees it: (3, 32, 32), or (64,) for vectors
    samples: int = 1  # predictors from the training of one member
    max_pairs: int | None = None  # pairs of members compared in a step; None: all
    grouped: bool | None = None  # members of one device run as one network; None: not measured yet
    divided: bool | None = None  # every rank has a share of w; None: not measured yet
    weights_sha256: list[str] | None = None  # of pretrained weights, by member
    teacher_sha256: list[str] | None = None  # of the teacher's members
    parts: tuple[str, ...] = ()  # the parts on each rank at the last start, in words

    @classmethod
    def of(cls, config: Config, num_members: int, input_shape: tuple[int, ...], parts: Sequence[str] = ()) -> Self:
        """Start a plan. `auto` settings that must be measured are None."""
        pairs, grouped = config.redundancy.max_pairs, config.ensemble.batched
        return cls(
            num_members,
            input_shape,
            config.samples,
            None if isinstance(pairs, str) else pairs,
            None if isinstance(grouped, str) else grouped,
            parts=tuple(parts),
        )

    @classmethod
    def of_older(cls, config: Config) -> Self:
        """Return the plan of a run of an earlier version, whose config holds the resolved values."""
        size, inputs = config.ensemble.size, config.network.inputs
        if not isinstance(size, int):
            raise ValueError(f"ensemble.size={size}, where a run has a number: its config or its plan is damaged")
        plan = cls.of(config, size, config.data.image_shape if inputs is None else (inputs,))
        digests = {"weights_sha256": config.network.sha256, "teacher_sha256": config.teacher.sha256}
        return cls(**{**asdict(plan), **digests})

    def resolve(self, config: Config) -> Config:
        """Return the configuration with its `auto` settings resolved, for tables and comparisons."""
        return replace(
            config,
            ensemble=replace(config.ensemble, size=self.num_members),
            redundancy=replace(config.redundancy, max_pairs=self.max_pairs),
        )

    @property
    def num_predictors(self) -> int:
        """The size of the ensemble that is evaluated, predicts and is exported: S samples of each of the M members."""
        return self.num_members * self.samples

    @property
    def reads_vectors(self) -> bool:
        return len(self.input_shape) == 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def parse(cls, text: str, origin: object) -> Self:
        """Parse a saved plan, perhaps someone else's: only numbers and words under known names are accepted."""
        try:
            values: dict[str, Any] = json.loads(text)
            plan = cls(**{**values, "input_shape": tuple(values["input_shape"]), "parts": tuple(values["parts"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{origin} is damaged") from error
        counts = [plan.num_members, plan.samples, *plan.input_shape, *([plan.max_pairs] if plan.max_pairs else [])]
        digests = [*(plan.weights_sha256 or []), *(plan.teacher_sha256 or []), *plan.parts]
        sound = all(type(count) is int and 0 < count < 10**6 for count in counts) and len(plan.input_shape) in (1, 3)
        flags = (plan.grouped, plan.divided)
        sound = sound and all(flag in (None, False, True) for flag in flags)
        if not sound or not all(isinstance(word, str) for word in digests):
            raise ValueError(f"{origin} is damaged")
        return plan
