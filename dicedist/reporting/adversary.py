"""The discriminator w: how well it tells joint from product pairs while it learns, and whether it can be trusted."""

import math
from collections.abc import Sequence

from dicedist.reporting import svg
from dicedist.reporting.dynamics import Course, chart
from dicedist.reporting.lines import Line, Reference, line_chart
from dicedist.reporting.markup import Section, ensembles, figure, grid, remark
from dicedist.reporting.records import Group, Point, pool

LOSS = Course("train/discriminator/loss", "Loss of w", "binary cross-entropy, training, nats")
ACCURACY = Course("train/discriminator/accuracy", "Accuracy of w", "pairs told apart rightly, training, %", 100)


def section(groups: Sequence[Group]) -> Section | None:
    comparing = [group for group in groups if "redundancy.delta" in group.settings]
    if not comparing:
        return None
    loss, accuracy = guessing(comparing)
    pictures = {
        "Loss of w": chart(comparing, LOSS, loss),
        "Accuracy of w": chart(comparing, ACCURACY, accuracy),
        "Calibration of w": calibration(comparing),
    }
    drawn = [figure(title, picture) for title, picture in pictures.items() if picture]
    absent = [title.lower() for title, picture in pictures.items() if not picture]
    return Section(
        "discriminator",
        "Discriminator",
        "w tells features of one input from features of two inputs of the same class. The closer it comes to guessing, "
        "the less redundant the members are. Its estimate can be believed where its calibration follows the diagonal: "
        "of the held-out pairs to which it gives a probability w, a share w are joint.",
        ensembles(comparing) + grid(drawn) + remark(f"Not recorded: {', '.join(absent)}." if absent else ""),
    )


def guessing(groups: Sequence[Group]) -> tuple[Reference | None, Reference | None]:
    """Loss and accuracy of a w that only knows the number of product pairs per joint pair."""
    ratios = {group.settings["redundancy.negatives"] for group in groups}
    if len(ratios) > 1:
        return None, None
    share = 1 / (1 + ratios.pop())
    loss = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return Reference(loss, "guessing"), Reference(100 * max(share, 1 - share), "guessing")


def calibration(groups: Sequence[Group]) -> str | None:
    lines = [Line(group.label, group.style, curve(group)) for group in groups]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    label = "share of joint pairs, held out"
    return line_chart("Calibration of w", lines, svg.unit("probability w"), label, svg.unit(label), diagonal=True)


def curve(group: Group) -> list[Point]:
    """The calibration bins of w, pooled over all runs."""
    bins: dict[int, list[dict[str, float]]] = {}
    for evaluation in group.evaluations:
        for found in (evaluation.get("redundancy") or {}).get("calibration", []):
            bins.setdefault(min(int(10 * found["mean"]), 9), []).append(found)
    points = []
    for _, found in sorted(bins.items()):
        count = sum(bin["count"] for bin in found)
        share = pool([sum(bin["count"] * bin["joint"] for bin in found) / count])
        assert share is not None
        points.append(Point(sum(bin["count"] * bin["mean"] for bin in found) / count, share))
    return points
