"""Differences from the first ensemble of a data set, with intervals: over seeds (paired t), over inputs (bootstrap).

Legend: N inputs, S seeds, K classes.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dicedist.console.lines import warn
from dicedist.metrics import Interval, bootstrap, ensemble_log_probabilities, paired_over_seeds
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, FURTHER, Measure
from dicedist.reporting.columns import Column, reading
from dicedist.reporting.markup import Cell, Head, Section, Table, fixed
from dicedist.reporting.records import Group, Recorded

COMPARED = [
    *(Column(measure.title, measure, reading("ensemble", measure.name)) for measure in (*ENSEMBLE, *FURTHER)),
    *(Column(measure.title, measure, reading("diversity", measure.name)) for measure in DIVERSITY if measure.summary),
]
RESAMPLED = [measure for measure in (*ENSEMBLE, *FURTHER) if measure.name in ("accuracy", "nll", "brier", "aurc")]
MEANS, OTHERS = 1000, 200  # resamples: for means over inputs, and for measures that need a call per resample
Pairs = list[tuple[Recorded, Recorded]]  # runs of equal seeds: of the ensemble, of the baseline


def section(groups: Sequence[Group]) -> Section | None:
    blocks = groupby(groups, key=lambda group: group.settings["data.name"])
    tables = [table for _, block in blocks if (table := one_block(*block)) is not None]
    return Section("report/differences", "Differences", {"tables": tables}) if tables else None


def one_block(baseline: Group, *others: Group) -> Table | None:
    """Return the table of differences for the ensembles of one data set."""
    paired = {group.label: pairs for group in others if (pairs := pairs_of(group, baseline))}
    if not paired:
        return None
    inputs = [over_inputs(pairs) for pairs in paired.values()]
    rows = []
    for column in COMPARED:
        measure = column.measure
        cells = [difference(over_seeds(pairs, column), measure) for pairs in paired.values()]
        cells += [difference(found.get(measure.name), measure) for found in inputs]
        rows.append([measure.column, *cells])
    heads = [
        Head(f"{label} (n = {len(pairs)})", over)
        for over in ("over seeds", "over inputs")
        for label, pairs in paired.items()
    ]
    caption = f"{baseline.settings['data.name']}: difference from {baseline.label}"
    return Table(caption, [Head("measure"), *heads], rows)


def pairs_of(group: Group, baseline: Group) -> Pairs:
    by_seed = {run.config.seed: run for run in baseline.runs if run.evaluation}
    return [(run, by_seed[run.config.seed]) for run in group.runs if run.evaluation and run.config.seed in by_seed]


def over_seeds(pairs: Pairs, column: Column) -> Interval | None:
    found = [[column.read(run.evaluation) for run in pair] for pair in pairs]
    known = [(own, other) for own, other in found if own is not None and other is not None]
    if not known:
        return None
    own, other = zip(*known, strict=True)
    return paired_over_seeds(own, other).times(column.measure.scale)


def over_inputs(pairs: Pairs) -> dict[str, Interval]:
    """Return the differences by measure; empty if runs lack logits or were tested on different inputs."""
    read = [log_probabilities(run) for pair in pairs for run in pair]
    known = [found for found in read if found is not None]
    if len(known) < len(read) or not all(torch.equal(labels_N, known[0][1]) for _, labels_N in known):
        return {}
    labels_N = known[0][1]
    own_NSK, other_NSK = (torch.stack([log_p_NK for log_p_NK, _ in known[side::2]], dim=1) for side in (0, 1))
    found = {}
    for measure in RESAMPLED:
        if measure.per_input is None:
            own_NS2, other_NS2 = (hits_only(log_p_NSK, labels_N) for log_p_NSK in (own_NSK, other_NSK))
            zeros_N = torch.zeros_like(labels_N)
            interval = bootstrap(mean_over_seeds(measure), own_NS2, zeros_N, other_NS2, OTHERS)
        else:
            interval = bootstrap(mean_over_seeds(measure), own_NSK, labels_N, other_NSK, MEANS)
        found[measure.name] = interval.times(measure.scale)
    return found


def hits_only(log_p_NSK: Tensor, labels_N: Tensor) -> Tensor:
    """Return two columns with the same confidences, of which the first is predicted where the prediction was right.

    AURC reads nothing else, and draws of two columns are much faster than draws of all classes.
    """
    top_NS, predictions_NS = log_p_NSK.max(dim=2)
    right_NS = predictions_NS == labels_N[:, None]
    columns_NS2 = torch.stack([right_NS, ~right_NS], dim=2)
    return top_NS[:, :, None].expand_as(columns_NS2).masked_fill(~columns_NS2, -torch.inf)


def mean_over_seeds(measure: Measure) -> Any:
    function: Any = measure.per_input or measure.function

    def mean(log_p_NSK: Tensor, labels_N: Tensor) -> Tensor | float:
        found = [function(log_p_NK, labels_N) for log_p_NK in log_p_NSK.unbind(1)]
        return sum(found) / len(found)

    return mean


def log_probabilities(recorded: Recorded) -> tuple[Tensor, Tensor] | None:
    try:
        saved = recorded.run.tensors(recorded.run.logits_file, recorded.evaluation)
        logits_MNK, labels_N = saved["logits"], saved["labels"]
    except (OSError, KeyError):
        return None
    except ValueError as error:
        warn(f"{error}; its differences are left out")
        return None
    return ensemble_log_probabilities(logits_MNK, recorded.evaluation.get("average", "logits")), labels_N.long()


def difference(interval: Interval | None, measure: Measure) -> Cell:
    """Format a difference: bold if the interval excludes 0, else gray."""
    if interval is None:
        return Cell("")
    return Cell(in_words(interval, measure), kind="best" if interval.excludes_zero else "unclear")


def in_words(interval: Interval, measure: Measure, signed: bool = True) -> str:
    mean, *ends = (
        ("+" if signed and value > 0 else "") + fixed(value, measure.decimals)
        for value in (interval.mean, interval.lower, interval.upper)
        if value is not None
    )
    return f"{mean} [{', '.join(ends)}]" if ends else mean
