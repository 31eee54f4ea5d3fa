"""Differences from the first ensemble of a data set, with intervals: over seeds (paired t), over inputs (bootstrap).

Legend: N inputs, S seeds, K classes.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dicedist.metrics import Interval, bootstrap, ensemble_log_probabilities, paired_over_seeds
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, FURTHER, Measure
from dicedist.reporting.contrasts import difference_text
from dicedist.reporting.markup import Section, table
from dicedist.reporting.records import Group, Recorded, dig

COMPARED = tuple(("ensemble", measure) for measure in (*ENSEMBLE, *FURTHER)) + tuple(
    ("diversity", measure) for measure in DIVERSITY if measure.summary
)
RESAMPLED = ("accuracy", "nll", "brier", "aurc")  # a resample of the others takes long, or they are not of inputs
RESAMPLES = 200
Pairs = list[tuple[Recorded, Recorded]]  # runs of equal seeds: of the ensemble, of the baseline


def section(groups: Sequence[Group]) -> Section | None:
    evaluated = [group for group in groups if group.evaluations]
    blocks = [list(block) for _, block in groupby(evaluated, key=lambda group: group.settings["data.name"])]
    tables = [one_block(block) for block in blocks if len(block) > 1]
    if not any(tables):
        return None
    return Section(
        "differences",
        "Differences",
        "From the first ensemble of the data set, run by run of equal seeds, with 95 % intervals: over seeds by a "
        "paired t, which says how much training varies, and over test inputs by a paired bootstrap of the mean over "
        "seeds, which says how much the test set does. A difference whose interval contains 0 is grey. Of many "
        "differences one in twenty leaves 0 out by chance.",
        "".join(tables),
    )


def one_block(block: Sequence[Group]) -> str:
    baseline, *others = block
    paired = [(group, pairs_of(group, baseline)) for group in others]
    known = [(group, pairs) for group, pairs in paired if pairs]
    if not known:
        return ""
    inputs = [over_inputs(pairs) for _, pairs in known]
    rows = []
    for part, measure in COMPARED:
        cells = [f"<td>{text(over_seeds(pairs, part, measure), measure)}</td>" for _, pairs in known]
        if any(measure.name in found for found in inputs) and part == "ensemble":
            cells += [f"<td>{text(found.get(measure.name), measure)}</td>" for found in inputs]
        else:
            cells += ["<td></td>"] * len(known)
        rows.append(f'<tr><th scope="row">{escape(measure.heading + measure.arrow)}</th>{"".join(cells)}</tr>')
    names = [f"{group.label} (n = {len(pairs)})" for group, pairs in known]
    over = "".join(
        f'<th scope="colgroup" colspan="{len(known)}">{title}</th>' for title in ("over seeds", "over inputs")
    )
    under = "".join(f'<th scope="col">{escape(name)}</th>' for name in names * 2)
    head = f'<tr><th scope="col" rowspan="2">measure</th>{over}</tr><tr>{under}</tr>'
    caption = f"{baseline.settings['data.name']}: difference from {baseline.label}"
    return table(caption, head, [("", rows)], 1 + 2 * len(known))


def pairs_of(group: Group, baseline: Group) -> Pairs:
    by_seed = {run.config.seed: run for run in baseline.runs if run.evaluation}
    return [(run, by_seed[run.config.seed]) for run in group.runs if run.evaluation and run.config.seed in by_seed]


def over_seeds(pairs: Pairs, part: str, measure: Measure) -> Interval | None:
    found = [[dig(run.evaluation, (part, measure.name)) for run in pair] for pair in pairs]
    known = [(own, other) for own, other in found if own is not None and other is not None]
    if not known:
        return None
    own, other = zip(*known, strict=True)
    return paired_over_seeds(own, other).times(measure.scale)


def over_inputs(pairs: Pairs) -> dict[str, Interval]:
    """The differences by measure; nothing where the runs kept no logits, or were not tested on the same inputs."""
    read = [[log_probabilities(run) for run in pair] for pair in pairs]
    if any(found is None for pair in read for found in pair):
        return {}
    labels_N = read[0][0][1]  # type: ignore[index]
    if not all(torch.equal(found[1], labels_N) for pair in read for found in pair if found is not None):
        return {}
    own_NSK, other_NSK = (torch.stack([pair[side][0] for pair in read], dim=1) for side in (0, 1))  # type: ignore[index]
    named = {measure.name: measure for _, measure in COMPARED if measure.name in RESAMPLED}
    return {
        name: bootstrap(mean_over_seeds(measure), own_NSK, labels_N, other_NSK, RESAMPLES).times(measure.scale)
        for name, measure in named.items()
    }


def mean_over_seeds(measure: Measure) -> Any:
    function: Any = measure.per_input or measure.function

    def mean(log_p_NSK: Tensor, labels_N: Tensor) -> Tensor | float:
        found = [function(log_p_NK, labels_N) for log_p_NK in log_p_NSK.unbind(1)]
        return sum(found) / len(found)

    return mean


def log_probabilities(recorded: Recorded) -> tuple[Tensor, Tensor] | None:
    try:
        with safe_open(recorded.run.logits_file, "pt") as file:
            logits_MNK, labels_N = file.get_tensor("logits"), file.get_tensor("labels")
    except (OSError, SafetensorError):
        return None
    return ensemble_log_probabilities(logits_MNK, recorded.evaluation.get("average", "logits")), labels_N.long()


def text(interval: Interval | None, measure: Measure) -> str:
    return "" if interval is None else difference_text(interval, measure)
