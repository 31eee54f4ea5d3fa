"""The section about the discriminator w: its loss and accuracy during training, and its calibration."""

import math
from collections.abc import Sequence
from dataclasses import replace

from dicedist.config import names
from dicedist.reporting import svg
from dicedist.reporting.calibration import mean
from dicedist.reporting.dynamics import Course, chart
from dicedist.reporting.lines import Line, Reference, line_chart
from dicedist.reporting.markup import Section
from dicedist.reporting.records import Group, Point, Pooled
from dicedist.reporting.svg import Figure

W = names.DISCRIMINATOR
LOSS = Course(names.train(W, names.LOSS), "Loss of w", "binary cross-entropy, training, nats")
ACCURACY = Course(names.train(W, names.ACCURACY), "Accuracy of w", "pairs classified correctly, training, %", 100)


def section(groups: Sequence[Group]) -> Section | None:
    comparing = [group for group in groups if "redundancy.delta" in group.settings]
    if not comparing:
        return None
    loss, accuracy = guessing(comparing)
    figures = {
        "loss": chart(comparing, replace(LOSS, reference=loss)),
        "accuracy": chart(comparing, replace(ACCURACY, reference=accuracy)),
        "calibration": calibration(comparing),
    }
    return Section("report/discriminator", "Discriminator", {"groups": comparing, "figures": figures})


def guessing(groups: Sequence[Group]) -> tuple[Reference | None, Reference | None]:
    """Return loss and accuracy of a w that only knows the number of product pairs per joint pair."""
    ratios = {group.settings["redundancy.negatives"] for group in groups}
    if len(ratios) > 1:
        return None, None
    share = 1 / (1 + ratios.pop())
    loss = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return (loss, "guessing"), (100 * max(share, 1 - share), "guessing")


def calibration(groups: Sequence[Group]) -> Figure | None:
    lines = [Line(group.label, group.style, curve(group)) for group in groups]
    x = svg.span("probability w", 0, 1)
    return line_chart("Calibration of w", lines, x, "share of joint pairs, held out", diagonal=True)


def curve(group: Group) -> list[Point]:
    """Return the calibration curve of w, pooled over all runs."""
    bins: dict[int, list[dict[str, float]]] = {}
    for evaluation in group.evaluations:
        for found in (evaluation.get("redundancy") or {}).get("calibration", []):
            bins.setdefault(min(int(10 * found["mean"]), 9), []).append(found)
    return [Point(mean(found, "mean"), Pooled(mean(found, "joint"), None, 1)) for _, found in sorted(bins.items())]
