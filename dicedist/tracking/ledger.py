"""Keeps the values of the last steps on the device, so that the host waits for them only at log time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dicedist.algorithm.step import Outcome
from dicedist.config import names


class Ledger:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.names: list[str] = []
        self.rows: list[Tensor] = []

    def add(self, step: int, outcome: Outcome) -> None:
        """Store the values of the step, then one flag per member: whether it was out of step."""
        self.names = list(outcome.values)
        self.steps.append(step)
        values = [value.float().view(1) for value in outcome.values.values()]
        self.rows.append(torch.cat([*values, outcome.out_of_step_M.float()]))

    def drain(self) -> tuple[dict[str, list[float]], str | None]:
        """Return the values of each step since the last call, by name, and the first fault, if there is any."""
        rows = torch.stack(self.rows).tolist() if self.rows else []
        fault = self.first_fault(rows)
        width = len(self.names)
        columns = dict(zip(self.names, zip(*(row[:width] for row in rows), strict=True), strict=bool(rows)))
        self.steps, self.rows = [], []
        return {name: [*values] for name, values in columns.items()}, fault

    def first_fault(self, rows: Sequence[Sequence[float]]) -> str | None:
        for step, row in zip(self.steps, rows, strict=True):
            values, late = row[: len(self.names)], row[len(self.names) :]
            for name, value in zip(self.names, values, strict=True):
                if not math.isfinite(value):
                    part, term = names.whose(name)
                    return (
                        f"{term} of {part or 'the discriminator'} became {value} at step {step}: "
                        "lower optimizer.lr or redundancy.delta; the last checkpoint is intact"
                    )
            for member, is_late in enumerate(late):
                if is_late:
                    lost = f"{names.member(member)} is out of step with the discriminator at step {step}"
                    return f"{lost}: it saw another batch"
        return None
