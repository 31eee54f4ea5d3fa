"""Reliability diagrams: is the ensemble right as often as it says, before and after temperature scaling?"""

from collections.abc import Sequence

from dicedist.reporting import svg
from dicedist.reporting.markup import Section, figure, grid, legend, unevaluated
from dicedist.reporting.records import Group
from dicedist.reporting.svg import CIRCLE, Panel, number

Bin = tuple[float, float, float]  # mean confidence, accuracy, share of the inputs


def section(groups: Sequence[Group]) -> Section | None:
    evaluated = [group for group in groups if group.evaluations]
    if not evaluated:
        return None
    before, after = svg.legend_key(None, hollow=True, line="dashed"), svg.legend_key(None)
    return Section(
        "reliability",
        "Reliability",
        "Test accuracy against the confidence with which the ensemble predicts, in 15 bins; larger marks hold more "
        "inputs. Below the diagonal the ensemble is overconfident, above it underconfident. T is fitted on one half "
        "of the test set, and the second ECE measured on the other.",
        legend([(before, "before temperature"), (after, "after")])
        + grid((figure(group.label, diagram(group), facts(group)) for group in evaluated), "four")
        + unevaluated(groups),
    )


def facts(group: Group) -> str:
    before, after = group.measure("ensemble", "ece"), group.measure("ensemble_tempered", "ece")
    temperature = group.measure("ensemble_tempered", "temperature")
    if before is None or after is None or temperature is None:
        return ""
    return f"ECE {100 * before.mean:.1f} → {100 * after.mean:.1f} %, T = {number(temperature.mean)}"


def diagram(group: Group) -> str:
    panel = Panel(svg.unit("confidence"), svg.unit("accuracy"), 300, 270)
    panel.reference((0, 0), (1, 1))
    words = []
    for when, hollow in (("before", True), ("after", False)):
        bins = pooled_bins(group, when)
        panel.line(
            [(confidence, accuracy) for confidence, accuracy, _ in bins], group.style, "dashed" if hollow else ""
        )
        for confidence, accuracy, share in bins:
            tip = f"{when} temperature: confidence {confidence:.2f}, accuracy {accuracy:.2f}, {share:.1%} of inputs"
            panel.mark(confidence, accuracy, group.style, tip, 2 + 6 * share**0.5, hollow, CIRCLE)
        gap = sum(share * (confidence - accuracy) for confidence, accuracy, share in bins)
        words.append(f"{when} temperature it is {abs(gap):.1%} too {'sure' if gap > 0 else 'unsure'} on average")
    return panel.draw(f"Reliability of {group.label}: {', '.join(words)}. {facts(group)}.")


def pooled_bins(group: Group, when: str) -> list[Bin]:
    """Bins over the inputs of all runs together."""
    columns = zip(*(evaluation["reliability"][when] for evaluation in group.evaluations), strict=True)
    found = [[bin for bin in column if bin["count"]] for column in columns]
    counts = [sum(bin["count"] for bin in column) for column in found]
    return [
        (
            sum(bin["count"] * bin["confidence"] for bin in column) / count,
            sum(bin["count"] * bin["accuracy"] for bin in column) / count,
            count / sum(counts),
        )
        for column, count in zip(found, counts, strict=True)
        if count
    ]
