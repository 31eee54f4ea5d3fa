"""The page and the Markdown table of a comparison that was decided beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dicedist.metrics.measures import OOD_SCORES, Measure
from dicedist.metrics.statistics import Interval, over_seeds
from dicedist.reporting import curves, svg
from dicedist.reporting.contrasts import (
    BEFORE,
    BY_NAME,
    PLAIN,
    Column,
    Evaluation,
    against,
    columns,
    difference_text,
    head,
    ood_reading,
    row_of,
    values,
)
from dicedist.reporting.curves import Curve, variations
from dicedist.reporting.forest import Bar, Row, forest
from dicedist.reporting.markup import Section, figure, fixed, grid, legend, table


@dataclass(frozen=True)
class Contender:
    """A method of the comparison: its evaluations by seed, and what its search cost."""

    name: str
    style: int
    evaluations: Sequence[Evaluation]
    chosen: Mapping[str, str]  # by the search
    trials: Mapping[str, int]  # outcome -> how many
    inputs: Mapping[str, Interval]  # name of a measure -> bootstrap of the difference from the baseline over inputs


@dataclass(frozen=True)
class Comparison:
    title: str
    question: str
    commit: str
    objective: str
    baseline: Contender
    contenders: Sequence[Contender]  # the baseline among them
    curves: Sequence[Curve]

    @property
    def columns(self) -> list[Column]:
        return columns([evaluation for one in self.contenders for evaluation in one.evaluations])

    @property
    def others(self) -> list[Contender]:
        return [one for one in self.contenders if one is not self.baseline]

    @property
    def about(self) -> str:
        seeds = len(self.baseline.evaluations)
        return f"{seeds} seeds of each method · protocol committed as {self.commit[:10]} before the test set was read"


def sections(comparison: Comparison) -> list[Section]:
    shown = comparison.columns
    found = [means(comparison, shown), differences(comparison, shown), detection(comparison)]
    if comparison.curves:
        found.append(curves.section(comparison.curves))
    return [*(section for section in found if section is not None), budget(comparison)]


def means(comparison: Comparison, shown: Sequence[Column]) -> Section:
    rows = []
    for one in comparison.contenders:
        found = [mean_text(over_seeds(values(one.evaluations, column)), column.measure) for column in shown]
        rows.append(row_of(one.name, one.style, found))
    return Section(
        "means",
        "Results",
        f"{comparison.question} Test set, mean ± sample deviation over seeds. Before and after T: temperature scaling, "
        "fitted on one half of the test set and measured on the other.",
        table("Mean and deviation over seeds", head(shown), [("", rows)], 1 + len(shown)),
    )


def differences(comparison: Comparison, shown: Sequence[Column]) -> Section:
    baseline, others = comparison.baseline, comparison.others
    apart = {one.name: against(one.evaluations, baseline.evaluations, shown) for one in others}
    rows = [row_of(one.name, one.style, [difference_text(d, c.measure) for c, d in apart[one.name]]) for one in others]
    named = sorted({name for one in others for name in one.inputs})
    under = [
        row_of(one.name, one.style, [difference_text(one.inputs[name], BY_NAME[name]) for name in named])
        for one in others
        if one.inputs
    ]
    titles = "".join(f'<th scope="col">{escape(BY_NAME[name].heading)}</th>' for name in named)
    pictured = {column.title: column.measure for column in shown}  # before and after T are one picture
    pictures = [difference_picture(title, measure, others, apart) for title, measure in pictured.items() if others]
    return Section(
        "differences",
        f"Differences from {baseline.name}",
        "With 95 % intervals; bold where the interval leaves zero out. With so many cells some will by chance: one in "
        "twenty where there is no difference at all. In the figures hollow marks are before temperature scaling.",
        grid(pictures)
        + table("Over seeds: paired t", head(shown), [("", rows)], 1 + len(shown))
        + table(
            "Over test inputs: paired bootstrap of the mean over seeds",
            f'<tr><th scope="col">method</th>{titles}</tr>',
            [("", under)],
            1 + len(named),
        ),
    )


def difference_picture(
    title: str, measure: Measure, others: Sequence[Contender], apart: Mapping[str, Sequence[tuple[Column, Interval]]]
) -> str:
    rows = [
        Row(
            one.name, [difference_bar(one, column, found) for column, found in apart[one.name] if column.title == title]
        )
        for one in others
    ]
    label = f"difference{', ' + measure.unit if measure.unit else ''}"
    return figure(f"Difference of {title}{measure.arrow}", forest(label, rows, zero=True))


def difference_bar(one: Contender, column: Column, found: Interval) -> Bar:
    tip = f"{one.name}, {column.heading}: {difference_text(found, column.measure, PLAIN, PLAIN)}"
    return Bar(found, one.style, tip, hollow=column.when == BEFORE)


def detection(comparison: Comparison) -> Section | None:
    """AUROC of every score that some method has."""
    auroc, rows = BY_NAME["auroc"], []
    for score, title in OOD_SCORES.items():
        column, bars = Column(title, auroc, ood_reading(score)), []
        for one in comparison.contenders:
            if found := values(one.evaluations, column):
                interval = over_seeds(found)
                bars.append(Bar(interval, one.style, f"{title} of {one.name} {fixed(interval.mean, auroc.decimals)}"))
        if bars:
            rows.append(Row(title, bars))
    if not rows:
        return None
    return Section(
        "scores",
        "OOD detection by score",
        "AUROC, the mean over OOD sets: 50 is chance. Bars are 95 % intervals over seeds.",
        legend((svg.legend_key(one.style), one.name) for one in comparison.contenders)
        + grid([figure("AUROC of every score and method", forest(auroc.heading, rows, width=540))], "two"),
    )


def mean_text(interval: Interval, measure: Measure) -> str:
    spread = "" if interval.deviation is None else f" <small>± {fixed(interval.deviation, measure.decimals)}</small>"
    return fixed(interval.mean, measure.decimals) + spread


def budget(comparison: Comparison) -> Section:
    rows = []
    for one in comparison.contenders:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in one.trials.items())
        chosen = ", ".join(f"{key}={value}" for key, value in one.chosen.items())
        cells = f'<td class="text">{escape(counted)}</td><td class="text wrap">{escape(chosen)}</td>'
        rows.append(f'<tr><th scope="row">{escape(one.name)}</th>{cells}<td>{len(one.evaluations)}</td></tr>')
    titles = ("method", "trials of the search", "chosen")
    top = "".join(f'<th scope="col" class="text">{title}</th>' for title in titles)
    top += '<th scope="col">seeds measured on the test set</th>'
    return Section(
        "budget",
        "Every trial",
        f"All methods had the same number of trials, and were chosen by {comparison.objective} on validation inputs.",
        table("Budgets", f"<tr>{top}</tr>", [("", rows)], 4),
    )


def markdown(comparison: Comparison) -> str:
    """The tables of results and differences, for docs/."""
    shown, baseline = comparison.columns, comparison.baseline
    rows = []
    for one in comparison.contenders:
        cells = []
        for column in shown:
            found, decimals = over_seeds(values(one.evaluations, column)), column.measure.decimals
            spread = "" if found.deviation is None else f" ± {found.deviation:.{decimals}f}"
            cells.append(f"{found.mean:.{decimals}f}{spread}")
        rows.append([one.name, *cells])
    apart = [apart_row(one.name, against(one.evaluations, baseline.evaluations, shown)) for one in comparison.others]
    trials = sum(sum(one.trials.values()) for one in comparison.contenders)
    pieces = [
        f"{comparison.title}: {comparison.about}; {trials} trials of search, equally many for each method.",
        lines(shown, rows),
        f"Differences from {baseline.name}, paired over seeds, 95 % intervals (bold: zero left out):",
        lines(shown, apart),
    ]
    if varied := variations(comparison.curves):
        pieces += [
            "One key varied, differences from its first value, paired over seeds:",
            lines([column for column, _ in varied[0].apart], [apart_row(one.name, one.apart) for one in varied]),
        ]
    return "\n\n".join(pieces) + "\n"


def apart_row(name: str, apart: Sequence[tuple[Column, Interval]]) -> list[str]:
    return [name, *(difference_text(d, c.measure, ("**", "**"), PLAIN) for c, d in apart)]


def lines(shown: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    heading = ["method", *(column.heading for column in shown)]
    every = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in every)
