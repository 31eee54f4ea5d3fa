"""Out-of-distribution detection: histograms of each score on test and OOD images, and the paper's five measures."""

import statistics
from collections.abc import Sequence

from dicedist.metrics.measures import OOD, OOD_SCORES
from dicedist.reporting import svg
from dicedist.reporting.markup import Head, Section, Table, estimate, estimates
from dicedist.reporting.records import Group, distinct
from dicedist.reporting.svg import Figure, Panel


def section(groups: Sequence[Group]) -> Section:
    names = distinct(name for group in groups for e in group.evaluations for name in e.get("ood", {}))
    missing = distinct(name for group in groups for run in group.runs for name in run.sets_not_found)
    drawn = {n: {g.label: [histograms(g, n, score) for score in scores_of(g, n)] for g in groups} for n in names}
    sets = [(name, drawn[name], measures(groups, name)) for name in names]
    return Section("report/ood", "OOD detection", {"sets": sets, "missing": missing, "rankings": rankings(groups)})


def scores_of(group: Group, name: str) -> list[str]:
    return distinct(score for evaluation in group.evaluations for score in evaluation.get("ood", {}).get(name, {}))


def histograms(group: Group, name: str, score: str) -> Figure:
    known = (evaluation.get("ood", {}).get(name, {}).get(score) for evaluation in group.evaluations)
    every = [result for result in known if result is not None]
    # Unbounded scores have a different range in each run, so the figure shows the first run.
    found = [result for result in every if result.get("range") == every[0].get("range")]
    inside, outside = (
        [statistics.fmean(column) for column in zip(*(result["histogram"][side] for result in found), strict=True)]
        for side in (0, 1)
    )
    low, high = found[0].get("range", (0.0, 1.0))
    percent = svg.axis("% of images", (0, 100 * max(*inside, *outside)), 3)
    panel = Panel(svg.span("score", low, high, 2), percent, 184, 132, 10)
    panel.area(steps(inside, low, high), 0, "inside")
    panel.area(steps(outside, low, high), 0, "outside")
    auroc = f"AUROC {100 * statistics.fmean(result['auroc'] for result in every):.1f}"
    means = [
        low + (high - low) * sum((place + 0.5) / len(side) * share for place, share in enumerate(side))
        for side in (inside, outside)
    ]
    title = OOD_SCORES.get(score, score)
    averages = f"on average {means[0]:.2f} for test images and {means[1]:.2f} for {name}"
    return panel.figure(title, f"{group.label}, {title}: {averages}. {auroc}.", auroc)


def steps(shares: Sequence[float], low: float, high: float) -> list[tuple[float, float]]:
    """Return the outline of a histogram in %, from zero to zero."""
    width = (high - low) / len(shares)
    corners = [(low + x * width, 100 * share) for place, share in enumerate(shares) for x in (place, place + 1)]
    return [(low, 0), *corners, (high, 0)]


def rankings(groups: Sequence[Group]) -> list[Table]:
    """Return a table for each group of sets: the scores of every ensemble, the best first."""
    found = [evaluation.get("ood_groups", {}) for group in groups for evaluation in group.evaluations]
    members = {name: entry for of_run in reversed(found) for name, entry in of_run.items()}  # of the first run
    return [ranking(groups, name, members[name]) for name in distinct(name for of_run in found for name in of_run)]


def ranking(groups: Sequence[Group], name: str, sets: dict[str, list[str]]) -> Table:
    ranked = []
    for group, score in ((own, score) for own in groups for score in ranked_scores(own, name)):
        path = ("ood_groups", name, "scores", score)
        auroc = group.measure(*path, "auroc")
        lower, upper = (group.measure(*path, "auroc_interval", side) for side in (0, 1))
        if auroc is not None and lower is not None and upper is not None:
            rates = [estimate(group.measure(*path, key), 2, 100) for key in ("fpr95", "fpr95_ood_positive")]
            interval = f"{100 * lower.mean:.2f} – {100 * upper.mean:.2f}"
            ranked.append(
                (auroc.mean, [OOD_SCORES.get(score, score), group.label, estimate(auroc, 2, 100), interval, *rates])
            )
    lacking = f", without {', '.join(sets['missing'])} (not found)" if sets["missing"] else ""
    titles = ("AUROC ↑", "95 % interval over images", *(measure.title + measure.arrow for measure in OOD[:2]))
    heads = [Head("score"), Head("ensemble", kind="text"), *map(Head, titles)]
    caption = f"Scores ranked, {name}: means over {', '.join(sets['sets'])}{lacking}, in %"
    return Table(caption, heads, [row for _, row in sorted(ranked, key=lambda entry: -entry[0])])


def ranked_scores(group: Group, name: str) -> list[str]:
    found = [evaluation.get("ood_groups", {}).get(name, {}) for evaluation in group.evaluations]
    return distinct(score for of_run in found for score in of_run.get("scores", {}))


def measures(groups: Sequence[Group], name: str) -> Table:
    scored = [(group, score) for group in groups for score in scores_of(group, name)]
    cells = [
        estimates([group.measure("ood", name, score, measure.name) for group, score in scored], measure)
        for measure in OOD
    ]
    rows = [
        [group.label, OOD_SCORES.get(score, score), *row] for (group, score), *row in zip(scored, *cells, strict=True)
    ]
    heads = [Head("ensemble"), Head("score", kind="text"), *(Head(measure.title + measure.arrow) for measure in OOD)]
    return Table(f"Test images against {name}, all in %", heads, rows)
