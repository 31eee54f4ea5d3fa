"""Reliability diagrams: is the ensemble right as often as it says, before and after temperature scaling?"""

from collections.abc import Mapping, Sequence

from dicedist.reporting import svg
from dicedist.reporting.markup import Section
from dicedist.reporting.records import Group
from dicedist.reporting.svg import CIRCLE, Figure, Panel, number

Bin = tuple[float, float, float]  # mean confidence, accuracy, share of the inputs


def section(groups: Sequence[Group]) -> Section:
    return Section("report/reliability", "Reliability", {"diagrams": [diagram(group) for group in groups]})


def facts(group: Group) -> str:
    before, after = group.measure("ensemble", "ece"), group.measure("ensemble_tempered", "ece")
    temperature = group.measure("ensemble_tempered", "temperature")
    if before is None or after is None or temperature is None:
        return ""
    return f"ECE {100 * before.mean:.1f} → {100 * after.mean:.1f} %, T = {number(temperature.mean)}"


def diagram(group: Group) -> Figure:
    panel = Panel(svg.span("confidence", 0, 1), svg.span("accuracy", 0, 1), 300, 270)
    panel.reference((0, 0), (1, 1))
    words = []
    for when, hollow in (("before", True), ("after", False)):
        bins = pooled_bins(group, when)
        line = [(confidence, accuracy) for confidence, accuracy, _ in bins]
        panel.line(line, group.style, "dashed" if hollow else "")
        for confidence, accuracy, share in bins:
            tip = f"{when} temperature: confidence {confidence:.2f}, accuracy {accuracy:.2f}, {share:.1%} of inputs"
            panel.mark(confidence, accuracy, group.style, tip, 2 + 6 * share**0.5, hollow, CIRCLE)
        gap = sum(share * (confidence - accuracy) for confidence, accuracy, share in bins)
        words.append(f"{when} temperature it is {abs(gap):.1%} too {'sure' if gap > 0 else 'unsure'} on average")
    seen = f"Reliability of {group.label}: {', '.join(words)}. {facts(group)}."
    return panel.figure(group.label, seen, facts(group))


def pooled_bins(group: Group, when: str) -> list[Bin]:
    """Return the reliability bins over the inputs of all runs together."""
    columns = zip(*(evaluation["reliability"][when] for evaluation in group.evaluations), strict=True)
    found = [column for bins in columns if (column := [bin for bin in bins if bin["count"]])]
    counts = [sum(bin["count"] for bin in column) for column in found]
    shares = [count / sum(counts) for count in counts]
    return [(mean(b, "confidence"), mean(b, "accuracy"), share) for b, share in zip(found, shares, strict=True)]


def mean(bins: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean of a value over the inputs of all bins."""
    return sum(bin["count"] * bin[name] for bin in bins) / sum(bin["count"] for bin in bins)
