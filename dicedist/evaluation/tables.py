"""The tables of an evaluation, for the terminal."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from dicedist.console.tables import table
from dicedist.evaluation.promises import MEANING, chosen_on, few_behind, no_better_than_guessing, percent, promises
from dicedist.metrics.measures import (
    CORRUPTION_ERROR,
    DIVERSITY,
    ENSEMBLE,
    FRESH_REDUNDANCY,
    FURTHER,
    OOD,
    OOD_SCORES,
    REDUNDANCY,
    SHIFT,
    TEMPERATURE,
    UNCERTAINTY,
    Measure,
)

Result = Mapping[str, Any]  # of evaluation.json, or a part of it


def cells(measures: Iterable[Measure], own: Result) -> list[float | None]:
    return [measure.in_unit(own.get(measure.name)) for measure in measures]


def headings(measures: Iterable[Measure]) -> list[str]:
    return [measure.heading for measure in measures]


PROTOCOL = (
    "the paper's protocol: tempered measures fit T on one half of the test set and\n"
    "measure the other half; predict does not use this T"
)


def show(result: Result) -> str:
    """Format all tables: first the decisions of `predict`, then the measures of the paper's protocol."""
    warning = no_better_than_guessing(result)
    return "\n\n".join(
        [
            *([textwrap.fill(warning, 80)] if warning else []),
            calibration_table(result),
            f"{PROTOCOL}\n{accuracy_table(result)}",
            further_table(result),
            diversity_table(result),
            *redundancy_table(result),
            *fresh_table(result),
            *ood_tables(result),
            *group_tables(result),
            *shift_tables(result),
        ]
    )


def printed(result: Result, verbose: bool) -> str:
    """Return the numbers that matter, or all tables."""
    return show(result) if verbose else headline(result)


def headline(result: Result) -> str:
    """Return the main numbers, after a warning if the ensemble is no better than guessing."""
    warning = no_better_than_guessing(result)
    return "\n".join([*([textwrap.fill(warning, 80)] if warning else []), main_numbers(result)])


def main_numbers(result: Result) -> str:
    """Return one line each for the gain over the members, the calibration, and abstention."""
    own, members, found = result["ensemble"], result["members"], result.get("calibration")
    mean = members["accuracy"]
    gain = f"{100 * (own['accuracy'] - mean):+.1f} points"
    lines = [f"accuracy: ensemble {percent(own['accuracy'])}, its members {percent(mean)} on average ({gain})"]
    if found is None:
        lines.append(f"calibration: ECE {percent(own['ece'])}; {UNCALIBRATED}")
    else:
        measures, test = found["test"]["measures"], found["test"]
        lines.append(
            f"calibration: ECE {percent(measures['ece'])} with temperature {found['temperature']:.3g} "
            f"({percent(own['ece'])} without)"
        )
        wrong = "" if test["risk"] is None else f", of which {percent(test['risk'])} are wrong"
        lines.append(
            f"abstention: answers {percent(test['answered'])} of the test set{wrong} "
            f"({percent(1 - measures['accuracy'])} without)"
        )
    return "\n".join(lines)


def accuracy_table(result: Result) -> str:
    measures = (*ENSEMBLE, TEMPERATURE)
    members = result["members"]["per_member"]
    rows = [(f"member {number}", own) for number, own in zip(result["member_ids"], members, strict=True)]
    if "fused" in result:
        rows.append(("fused", result["fused"]))
    if "student" in result:
        rows[-1] = (f"{rows[-1][0]}, the student", result["student"])  # always the last member
    rows += [("ensemble", result["ensemble"]), ("tempered", result["ensemble_tempered"])]
    return table(["test set", *headings(measures)], [[label, *cells(measures, own)] for label, own in rows])


def further_table(result: Result) -> str:
    """Format calibration, abstention, uncertainty and disagreement, one measure per line."""
    parts = (result["ensemble"], result["ensemble_tempered"])
    rows = list(zip(headings(FURTHER), *(cells(FURTHER, part) for part in parts), strict=True))
    unsure = cells(UNCERTAINTY, result.get("uncertainty", {}))
    rows += [(heading, value, None) for heading, value in zip(headings(UNCERTAINTY), unsure, strict=True)]
    return table(["uncertainty", "ensemble", "tempered"], rows)


UNCALIBRATED = (
    "not calibrated: no validation images (data.split=full), or an evaluation by an earlier version; "
    "write `evaluate calibration.source=test` to calibrate on test images"
)


def calibration_table(result: Result) -> str:
    """Format the decisions of `predict`, their promises, and the results on the test set."""
    found = result.get("calibration")
    if found is None:
        return UNCALIBRATED
    rows = [[each.what, each.promised, each.tested] for each in promises(found)]
    head = ["what predict does", "promised", "on the test set" + (" ITSELF" if found["source"] == "test" else "")]
    few = few_behind(found)
    remarks = [f"({MEANING})", *([textwrap.fill(few, 80)] if few else [])]
    return "\n".join([chosen_on(found), table(head, rows), *remarks])


SHORT = {"fpr95": "ID+ FPR95", "fpr95_ood_positive": "OOD+ FPR95", "detection": "det. error"}
CONVENTIONS = ("fpr95", "fpr95_ood_positive")
LEGEND = (
    "all in %; ID+ FPR95: OOD images accepted where 95 % of the test images are,\n"
    "OOD+ FPR95: test images rejected where 95 % of the OOD images are"
)


def ood_tables(result: Result) -> list[str]:
    """Format a table for each OOD set, at most 80 columns wide, and a legend."""
    titles = [SHORT.get(measure.name, measure.title) for measure in OOD]
    tables = []
    for outside, scores in result["ood"].items():
        rows = [[OOD_SCORES.get(score, score), *cells(OOD, found)] for score, found in scores.items()]
        tables.append(f"OOD: {outside}\n" + table(["score", *titles], rows))
    legend = [LEGEND] if tables else []
    return [*tables, *legend, *(f"not found: {line}" for line in result["ood_missing"])]


def group_tables(result: Result) -> list[str]:
    """List the scores by mean AUROC over the sets of a group, best first."""
    tables = []
    for group, found in result.get("ood_groups", {}).items():
        ranked = sorted(found["scores"].items(), key=lambda entry: -entry[1]["auroc"])
        rows = [
            [OOD_SCORES.get(score, score), *(100 * value for value in (own["auroc"], *own["auroc_interval"]))]
            + [100 * own[name] for name in CONVENTIONS]
            for score, own in ranked
        ]
        lacking = f"; without {', '.join(found['missing'])}, not found" if found["missing"] else ""
        title = f"OOD group {group}: {', '.join(found['sets'])}{lacking}\n"
        tables.append(title + table(["score", "AUROC, %", "from", "to", *(SHORT[name] for name in CONVENTIONS)], rows))
    return tables


def shift_tables(result: Result) -> list[str]:
    """Format the means over the kinds of a shift by severity; 0 stands for the unchanged test images."""
    tables = []
    for kind, found in result.get("shift", {}).items():
        rows = [[severity, *cells(SHIFT, own)] for severity, own in found["mean"].items()]
        title = f"{kind}, {found['num_inputs']:,} images each: severity"
        note = f"{CORRUPTION_ERROR.heading}: {CORRUPTION_ERROR.in_unit(found[CORRUPTION_ERROR.name]):.2f}"
        tables.append(table([title, *headings(SHIFT)], rows) + f"\n{note}")
    return tables


def diversity_table(result: Result) -> str:
    rows = list(zip(headings(DIVERSITY), cells(DIVERSITY, result["diversity"]), strict=True))
    note = "\n(one member alone has no diversity)" if len(result["member_ids"]) == 1 else ""
    sizes = [[int(size), 100 * accuracy] for size, accuracy in result["accuracy_by_size"].items()]
    return table(["diversity", "value"], rows) + note + "\n\n" + table(["members", "accuracy, %"], sizes)


def redundancy_table(result: Result) -> list[str]:
    found = result["redundancy"]
    if found is None:
        return []
    rows = [[f"{i} and {j}", nats] for (i, j), nats in zip(found["pairs"], found["nats_P"], strict=True)]
    accuracy = f"discriminator accuracy {100 * found['accuracy']:.1f} %"
    return [table(["members", f"{REDUNDANCY.heading}, by the run's own w"], rows) + "\n" + accuracy]


def fresh_table(result: Result) -> list[str]:
    found = result.get("redundancy_fresh")
    if found is None:
        return []
    kinds = [kind for kind in FRESH_REDUNDANCY if kind in found]  # earlier versions saved only one
    columns = [found[kind]["nats_P"] for kind in kinds]
    rows = [[f"{i} and {j}", *nats] for (i, j), *nats in zip(found["pairs"], *columns, strict=True)]
    titles = headings(FRESH_REDUNDANCY[kind] for kind in kinds)
    return [table(["members", *titles], rows) + "\n(by a fresh estimator, the same for every run)"]
