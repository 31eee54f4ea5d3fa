"""Decisions of `predict`: temperature, abstention, label sets and OOD threshold, with their guarantees."""

from collections.abc import Sequence
from typing import Any

from dicedist.evaluation.promises import MEANING, chosen_on, few_behind, no_better_than_guessing, promises
from dicedist.reporting.markup import Head, Section, Table
from dicedist.reporting.records import Group


def section(groups: Sequence[Group]) -> Section:
    first = [(group, group.evaluations[0]) for group in groups]
    values = {
        "entries": [entry(group, evaluation) for group, evaluation in first if evaluation.get("calibration")],
        "uncalibrated": [group for group, evaluation in first if not evaluation.get("calibration")],
        "guessing": [(group, line) for group, found in first if (line := no_better_than_guessing(found))],
        "several": any(len(group.evaluations) > 1 for group in groups),
        "meaning": MEANING,
    }
    return Section("report/decisions", "What predict does", values)


def entry(group: Group, evaluation: dict[str, Any]) -> tuple[Group, Table, str | None]:
    """Return the table of the run with the lowest seed. Each run has its own thresholds."""
    found = evaluation["calibration"]
    itself = " itself" if found["source"] == "test" else ""
    heads = [Head("what predict does"), Head("promised", kind="text"), Head(f"on the test set{itself}", kind="text")]
    rows = [[each.what, each.promised, each.tested] for each in promises(found)]
    caption = f"{group.label}, {chosen_on(found)}"
    return group, Table(caption, heads, rows), few_behind(found)
