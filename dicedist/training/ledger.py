"""Values of the last steps, kept on the device so that the host waits for them only at log time."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dicedist.algorithm.step import Outcome
from dicedist.config import names
from dicedist.training.listeners import Listener


class Ledger(Listener):
    def __init__(self) -> None:
        self.steps: list[tuple[int, list[str]]] = []  # each step with the names of its values
        self.rows: list[Tensor] = []

    def after_step(self, done: int, outcome: Outcome) -> None:
        """Store the values of the step, then one flag per member: 1 if the member was out of step."""
        self.steps.append((done - 1, list(outcome.values)))
        values = [value.float().view(1) for value in outcome.values.values()]
        self.rows.append(torch.cat([*values, outcome.out_of_step_M.float()]))

    def drain(self) -> tuple[dict[str, list[float]], str | None]:
        """Return the values of all steps since the last call, by name, and the first fault, if any."""
        lengths = [len(row) for row in self.rows]
        flat = iter(torch.cat(self.rows).tolist() if self.rows else [])
        columns: dict[str, list[float]] = {}
        fault = None
        for (step, names_of_step), length in zip(self.steps, lengths, strict=True):
            row = list(itertools.islice(flat, length))
            for name, value in zip(names_of_step, row, strict=False):
                columns.setdefault(name, []).append(value)
            fault = fault or fault_in(step, names_of_step, row)
        self.steps, self.rows = [], []
        return columns, fault


def fault_in(step: int, names_of_step: Sequence[str], row: Sequence[float]) -> str | None:
    for name, value in zip(names_of_step, row, strict=False):
        if not math.isfinite(value):
            part, term = names.whose(name)
            return (
                f"{term} of {part or 'the discriminator'} became {value} at step {step}: "
                "lower optimizer.lr or redundancy.delta; the last checkpoint is intact"
            )
    for member, is_late in enumerate(row[len(names_of_step) :]):
        if is_late:
            lost = f"{names.member(member)} is out of step with the discriminator at step {step}"
            return f"{lost}: it saw another batch"
    return None
