"""The page and the Markdown tables of a preregistered comparison."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dicedist.metrics import statistics
from dicedist.metrics.measures import OOD_SCORES, SET_SIZE
from dicedist.metrics.statistics import Interval
from dicedist.reporting.columns import BY_NAME, Column, auroc_reading, common_sets, reading, shift_reading
from dicedist.reporting.comparison import difference, in_words, over_inputs, over_seeds, pairs_of
from dicedist.reporting.forest import Bar, forest
from dicedist.reporting.markup import Cell, Head, Row, Section, Table, estimate, fixed, named
from dicedist.reporting.records import Group, distinct
from dicedist.reporting.svg import Figure
from dicedist.reporting.tradeoff import Curve, equal_accuracy, trade

BEFORE, AFTER = "before T", "after T"


@dataclass(frozen=True)
class Comparison:
    title: str
    question: str
    commit: str
    objective: str
    baseline: Group
    groups: Sequence[Group]  # of the methods, the baseline among them
    chosen: Mapping[str, Mapping[str, str]]  # method -> the values that its search chose
    trials: Mapping[str, Mapping[str, int]]  # method -> outcome of a trial -> how many
    curves: Sequence[Curve]
    accuracy: float  # of members, in %, at which the ratio-errors of curves are compared

    @property
    def others(self) -> list[Group]:
        return [group for group in self.groups if group is not self.baseline]

    @property
    def about(self) -> str:
        seeds = len(self.baseline.evaluations)
        return f"{seeds} seeds of each method · protocol committed as {self.commit[:10]} before the test set was read"


@dataclass(frozen=True)
class Contrast:
    """Differences between two ensembles, paired over seeds."""

    name: str
    style: int
    differences: Sequence[tuple[Column, Interval]]


def columns(groups: Sequence[Group]) -> list[Column]:
    """Return the columns in which every run has a value."""
    sets = common_sets(groups)
    known = [
        Column("ensemble accuracy", BY_NAME["accuracy"], reading("ensemble", "accuracy")),
        Column("members' accuracy", BY_NAME["accuracy"], reading("members", "accuracy")),
        *(
            Column(BY_NAME[name].title, BY_NAME[name], reading(part, name), when)
            for name in ("nll", "ece", "brier")
            for when, part in ((BEFORE, "ensemble"), (AFTER, "ensemble_tempered"))
        ),
        Column(BY_NAME["ratio_error"].title, BY_NAME["ratio_error"], reading("diversity", "ratio_error")),
        *(
            Column(f"OOD AUROC, {OOD_SCORES[score]}", BY_NAME["auroc"], auroc_reading(score, sets))
            for score in ("max_softmax", "mutual_information", "knn", "dice_x_w")
        ),
        Column(SET_SIZE.title, SET_SIZE, reading("calibration", "test", "set_size")),
        Column("accuracy, shifted images", BY_NAME["accuracy"], shift_reading("accuracy")),
        *(
            Column(f"{BY_NAME[name].title}, shifted images", BY_NAME[name], shift_reading(read), when)
            for name in ("nll", "ece")
            for when, read in ((BEFORE, name), (AFTER, f"{name}_calibrated"))
        ),
    ]
    evaluations = [evaluation for group in groups for evaluation in group.evaluations]
    return [column for column in known if all(column.read(evaluation) is not None for evaluation in evaluations)]


def contrast(name: str, group: Group, baseline: Group, shown: Sequence[Column]) -> Contrast:
    pairs = pairs_of(group, baseline)
    found = [(column, over_seeds(pairs, column)) for column in shown]
    return Contrast(name, group.style, [(column, interval) for column, interval in found if interval is not None])


def contrasts(comparison: Comparison) -> list[Contrast]:
    shown = columns(comparison.groups)
    return [contrast(group.label, group, comparison.baseline, shown) for group in comparison.others]


def variations(curves: Sequence[Curve]) -> list[Contrast]:
    """Return the contrast of every value of a curve's key with the first value."""
    shown, found = columns([group for curve in curves for group in curve.stops.values()]), []
    for curve in curves:
        (first, baseline), *others = curve.stops.items()
        key = curve.key.rpartition(".")[2]
        found += [contrast(f"{curve.name}, {key} {v} to {first}", group, baseline, shown) for v, group in others]
    return found


def sections(comparison: Comparison) -> list[Section]:
    groups, curves, apart = comparison.groups, comparison.curves, contrasts(comparison)
    means = {"question": comparison.question, "table": means_table("Mean and deviation over seeds", groups)}
    titles = distinct(column.title for one in apart for column, _ in one.differences)  # before and after T share one
    differences = {
        "figures": [difference_picture(title, apart) for title in titles],
        "tables": [contrast_table("Over seeds: paired t", apart), inputs_table(comparison)],
    }
    found = [
        Section("evidence/means", "Results", means),
        Section("evidence/differences", f"Differences from {comparison.baseline.label}", differences),
    ]
    if scores := detection(groups):
        found.append(Section("evidence/scores", "OOD detection by score", {"groups": groups, "figures": [scores]}))
    if curves:
        varied = contrast_table("A value of the varied key to its first: paired t over seeds", variations(curves))
        equal = equal_accuracy(curves, comparison.accuracy)
        cost = {"curves": curves, "figures": [trade(curves)], "tables": [equal, varied]}
        found.append(Section("evidence/cost", "What diversity costs", cost))
    return [*found, Section("evidence/budget", "Every trial", {"comparison": comparison})]


def means_table(caption: str, groups: Sequence[Group]) -> Table:
    shown = columns(groups)
    rows = [
        [named(group), *(estimate(c.pooled(group), c.measure.decimals, c.measure.scale) for c in shown)]
        for group in groups
    ]
    return by_method(caption, shown, rows)


def by_method(caption: str, shown: Iterable[Column], rows: Sequence[Row]) -> Table:
    return Table(caption, [Head("method"), *(Head(column.heading + column.measure.arrow) for column in shown)], rows)


def contrast_table(caption: str, found: Sequence[Contrast]) -> Table | None:
    if not found:
        return None
    rows = [
        [Cell(one.name, style=one.style), *(difference(d, column.measure) for column, d in one.differences)]
        for one in found
    ]
    return by_method(caption, (column for column, _ in found[0].differences), rows)


def inputs_table(comparison: Comparison) -> Table:
    found = [(group, over_inputs(pairs_of(group, comparison.baseline))) for group in comparison.others]
    measures = [measure for name, measure in BY_NAME.items() if any(name in of_group for _, of_group in found)]
    rows = [[named(group), *(difference(of_group.get(m.name), m) for m in measures)] for group, of_group in found]
    heads = [Head("method"), *(Head(measure.heading) for measure in measures)]
    return Table("Over test inputs: paired bootstrap of the mean over seeds", heads, rows)


def difference_picture(title: str, found: Sequence[Contrast]) -> Figure:
    rows = {one.name: [(c, interval) for c, interval in one.differences if c.title == title] for one in found}
    bars = {
        one.name: [
            Bar(interval, one.style, f"{one.name}, {c.heading}: {in_words(interval, c.measure)}", c.when == BEFORE)
            for c, interval in rows[one.name]
        ]
        for one in found
    }
    measure = rows[found[0].name][0][0].measure
    label = f"difference{', ' + measure.unit if measure.unit else ''}"
    return forest(f"Difference of {title}{measure.arrow}", label, bars, zero=True)


def detection(groups: Sequence[Group]) -> Figure | None:
    """Draw the AUROC of every score that some method has."""
    auroc, sets, rows = BY_NAME["auroc"], common_sets(groups), {}
    for score, title in OOD_SCORES.items():
        column = Column(title, auroc, auroc_reading(score, sets))
        known = [(group, found) for group in groups if (found := column.pooled(group)) is not None]
        if known:
            rows[title] = [
                Bar(
                    statistics.over_seeds(found.values).times(auroc.scale),
                    group.style,
                    f"{title} of {group.label} {fixed(auroc.scale * found.mean, auroc.decimals)}",
                )
                for group, found in known
            ]
    return forest("AUROC of every score and method", auroc.heading, rows, width=540) if rows else None


def markdown(comparison: Comparison) -> str:
    """Return the tables of results and differences as Markdown, for docs/."""
    trials, baseline = sum(sum(one.values()) for one in comparison.trials.values()), comparison.baseline.label
    about = f"{comparison.title}: {comparison.about}; {trials} trials of search, equally many for each method."
    apart = f"Differences from {baseline}, paired over seeds, 95 % intervals (bold: zero left out):"
    varied = "One key varied, differences from its first value, paired over seeds:"
    tables = [
        means_table(about, comparison.groups),
        contrast_table(apart, contrasts(comparison)),
        contrast_table(varied, variations(comparison.curves)),
    ]
    return "\n".join(in_markdown(table) for table in tables if table is not None)


def in_markdown(table: Table) -> str:
    def text(cell: Cell | str) -> str:
        if isinstance(cell, str):
            return cell
        return f"**{cell.text}**" if cell.kind == "best" else f"{cell.text} {cell.spread}".rstrip()

    heads = [head.title.rstrip(" ↑↓") for head in table.heads]
    lines = [heads, ["---"] * len(heads), *([text(cell) for cell in row] for row in table.rows)]
    return f"{table.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
