"""The tables of an evaluation, for the terminal."""

from typing import Any

from dicedist.console.tables import table
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, OOD, OOD_SCORES, REDUNDANCY, TEMPERATURE, Measure


def show(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            accuracy_table(result),
            diversity_table(result),
            *redundancy_table(result),
            *fresh_table(result),
            *ood_tables(result),
        ]
    )


def accuracy_table(result: dict[str, Any]) -> str:
    measures = (*ENSEMBLE, TEMPERATURE)
    members = result["members"]["per_member"]
    rows = [(f"member {number}", own) for number, own in zip(result["member_ids"], members, strict=True)]
    if "student" in result:
        rows[-1] = (f"{rows[-1][0]}, the student", result["student"])  # always the last member
    rows += [("ensemble", result["ensemble"]), ("ensemble, tempered", result["ensemble_tempered"])]
    return table(
        ["test set", *(measure.heading for measure in measures)],
        [[label, *(shown(measure, own.get(measure.name)) for measure in measures)] for label, own in rows],
    )


def shown(measure: Measure, value: float | None) -> float | None:
    return None if value is None else measure.scale * value


def diversity_table(result: dict[str, Any]) -> str:
    rows = [[measure.heading, shown(measure, result["diversity"].get(measure.name))] for measure in DIVERSITY]
    note = "\n(one member alone has no diversity)" if len(result["member_ids"]) == 1 else ""
    sizes = [[int(size), 100 * accuracy] for size, accuracy in result["accuracy_by_size"].items()]
    return table(["diversity", "value"], rows) + note + "\n\n" + table(["members", "accuracy, %"], sizes)


def redundancy_table(result: dict[str, Any]) -> list[str]:
    found = result["redundancy"]
    if found is None:
        return []
    rows = [[f"{i} and {j}", nats] for (i, j), nats in zip(found["pairs"], found["nats_P"], strict=True)]
    accuracy = f"discriminator accuracy {100 * found['accuracy']:.1f} %"
    return [table(["members", f"{REDUNDANCY.heading}, by the run's own w"], rows) + "\n" + accuracy]


def fresh_table(result: dict[str, Any]) -> list[str]:
    found = result.get("redundancy_fresh")
    if found is None:
        return []
    kinds = ("conditional", "unconditional")
    rows = [
        [f"{i} and {j}", *nats]
        for (i, j), *nats in zip(found["pairs"], *(found[kind]["nats_P"] for kind in kinds), strict=True)
    ]
    return [table(["members", "given the class, nats, by a fresh estimator", "in all, nats"], rows)]


def ood_tables(result: dict[str, Any]) -> list[str]:
    rows = [
        [outside, OOD_SCORES.get(score, score), *(shown(measure, found[measure.name]) for measure in OOD)]
        for outside, scores in result["ood"].items()
        for score, found in scores.items()
    ]
    missing = [f"not found: {line}" for line in result["ood_missing"]]
    header = ["out of distribution", "score", *(measure.heading for measure in OOD)]
    return [*([table(header, rows)] if rows else []), *missing]
