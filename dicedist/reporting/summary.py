"""The summary: one row per ensemble with seeds pooled, the best of each column in bold, and tiles for the best."""

import statistics
from collections.abc import Sequence
from itertools import groupby

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, FRESH_REDUNDANCY, OOD, OOD_SCORES
from dicedist.reporting import paper
from dicedist.reporting.columns import Column, Evaluation, Reading, auroc_reading, common_sets, reading
from dicedist.reporting.markup import Cell, Head, Row, Section, Table, best_of, estimate, estimates, named
from dicedist.reporting.records import Group, Pooled

FRESH = "redundancy, by a fresh estimator"
PREDICTORS = ("ensemble", "members", "student")
PRAISES = {  # measure and title of a column -> text of the tile for the best ensemble
    ("accuracy", "ensemble"): "most accurate, %",
    ("nll", "after"): "lowest NLL after temperature, paper's protocol",
    ("ratio_error", "ratio-error ↑"): "highest ratio-error",
    ("auroc", OOD_SCORES["max_softmax_tempered"]): "best OOD AUROC, %",
}


class Quoted(Column):
    """The paper's figure for exactly these settings."""

    def pooled(self, group: Group) -> Pooled | None:
        return paper.accuracy(group.runs[0].config)


def section(groups: Sequence[Group], unevaluated: Sequence[Group]) -> Section:
    shown = columns(groups)
    blocks = {name: list(block) for name, block in groupby(groups, key=lambda group: group.settings["data.name"])}
    rows: list[Row] = []
    for name, block in blocks.items():
        rows += [name] if len(blocks) > 1 else []
        rows += block_rows(block, shown)
    heads = [Head("ensemble"), Head("n"), *(Head(column.title, column.over) for column in shown)]
    values = {
        "tiles": tiles(groups, shown) if len(blocks) == 1 else [],
        "table": Table("Test set, the paper's protocol: mean ± sample deviation over n seeds", heads, rows),
        "fresh": any(column.over == FRESH for column in shown),
        "sets": common_sets(groups),
        "unevaluated": unevaluated,
        "glossary": glossary([*groups, *unevaluated], shown),
    }
    return Section("report/summary", "Summary", values)


def columns(groups: Sequence[Group]) -> list[Column]:
    """Return the columns in which some ensemble has a value."""
    accuracy, *others = [measure for measure in ENSEMBLE if measure.summary]
    errors = next(measure for measure in DIVERSITY if measure.summary)
    auroc, sets = next(measure for measure in OOD if measure.summary), common_sets(groups)
    known = [Column(who, accuracy, reading(who, accuracy.name), over=accuracy.column) for who in PREDICTORS]
    known.append(Quoted("the paper's", accuracy, reading("paper"), over=accuracy.column))
    for measure in others:
        known.append(Column("before", measure, reading("ensemble", measure.name), over=measure.column))
        known.append(Column("after", measure, reading("ensemble_tempered", measure.name), over=measure.column))
    known.append(Column(errors.column, errors, reading("diversity", errors.name), over="between members"))
    for kind, measure in FRESH_REDUNDANCY.items():
        known.append(Column(measure.column, measure, fresh_redundancy(kind), over=FRESH))
    for score in ("max_softmax_tempered", "dice_x_w_tempered"):
        known.append(Column(OOD_SCORES[score], auroc, auroc_reading(score, sets), over=f"OOD {auroc.column}"))
    return [column for column in known if any(column.pooled(group) is not None for group in groups)]


def fresh_redundancy(kind: str) -> Reading:
    """Return a reading of the mean over pairs, by a fresh estimator. A run's own w is not comparable between runs."""

    def read(evaluation: Evaluation) -> float | None:
        found = (evaluation.get("redundancy_fresh") or {}).get(kind)
        return statistics.fmean(found["nats_P"]) if found else None

    return read


def block_rows(groups: Sequence[Group], shown: Sequence[Column]) -> list[Row]:
    """Return the rows of the ensembles of one data set. Ensembles of different data sets are not compared."""
    cells = [estimates([column.pooled(group) for group in groups], column.measure) for column in shown]
    return [[named(group), len(group.evaluations), *row] for group, *row in zip(groups, *cells, strict=True)]


def tiles(groups: Sequence[Group], shown: Sequence[Column]) -> list[tuple[str, Cell, Cell]]:
    """Return tiles for the main measures: the ensemble that is best beyond the deviations, or a single ensemble."""
    found = []
    for column in shown:
        praise, values = PRAISES.get((column.measure.name, column.title)), [column.pooled(group) for group in groups]
        first = [True] if len(groups) == 1 else best_of(values, column.measure)
        for group, value, is_first in zip(groups, values, first, strict=True):
            if praise and is_first and value is not None:
                cell = estimate(value, column.measure.decimals, column.measure.scale)
                found.append((praise if len(groups) > 1 else alone(column), cell, named(group)))
    return found


def alone(column: Column) -> str:
    """Return the text of a tile for a single ensemble."""
    when = " temperature, paper's protocol" if column.title in ("before", "after") else ""
    return f"{column.over.rstrip(' ↑↓')}, {column.title.rstrip(' ↑↓')}{when}"


def glossary(groups: Sequence[Group], shown: Sequence[Column]) -> dict[str, str]:
    meanings = {group.settings["method.title"]: group.settings["method.meaning"] for group in groups}
    meanings |= {column.measure.title: column.measure.meaning for column in shown if column.measure.meaning}
    return meanings
