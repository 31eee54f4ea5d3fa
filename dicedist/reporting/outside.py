"""Out-of-distribution detection: histograms of each score on test and OOD images, and the paper's five measures."""

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from dicedist.metrics.measures import OOD, OOD_SCORES
from dicedist.reporting import svg
from dicedist.reporting.markup import Section, best_of, cell, figure, folded, grid, legend, remark, table, unevaluated
from dicedist.reporting.records import Group, Pooled, dig, pool
from dicedist.reporting.svg import Panel

NO_SETS = "The runs name no OOD set: python -m dicedist.evaluate run=runs/NAME ood.sets.NAME=FOLDER measures one."


def section(groups: Sequence[Group]) -> Section | None:
    evaluated = [group for group in groups if group.evaluations]
    if not evaluated:
        return None
    names = list(dict.fromkeys(name for group in evaluated for name in outside_sets(group)))
    missing = list(dict.fromkeys(name for group in evaluated for run in group.runs for name in run.sets_not_found))
    gaps = f"Not found when the runs were evaluated: {', '.join(missing)}." if missing else "" if names else NO_SETS
    key = [
        ('<i class="swatch inside"></i>', "test images"),
        ('<i class="swatch outside"></i>', "images from elsewhere"),
    ]
    sets = "".join(one_set(evaluated, name, is_open=place == 0) for place, name in enumerate(names))
    return Section(
        "ood",
        "OOD detection",
        "How sure the ensemble is of test images and of images from another data set. The less the two histograms "
        "overlap, the better the score tells them apart: AUROC 100 is perfect, 50 is chance. DICE × w scales the "
        "logits by the mean of 1 − w over pairs of members; + T is after temperature. Two rates are called FPR95: the "
        "first column counts images from elsewhere that are accepted (test images are the positives, as in the paper), "
        "the second test images that are rejected (as in OpenOOD).",
        (rankings(evaluated) + legend(key) + sets if names else "") + remark(gaps) + unevaluated(groups),
    )


def outside_sets(group: Group) -> list[str]:
    return list(dict.fromkeys(name for evaluation in group.evaluations for name in evaluation.get("ood", {})))


def one_set(groups: Sequence[Group], name: str, is_open: bool) -> str:
    rows = []
    for group in groups:
        if found := scores_of(group, name):
            pictures = [figure(OOD_SCORES.get(score, score), *histograms(group, name, score)) for score in found]
            rows.append(f"<h3>{escape(group.label)}</h3>" + grid(pictures, "small"))
    return folded(name, "".join(rows) + measures(groups, name), is_open)


def scores_of(group: Group, name: str) -> list[str]:
    known = [evaluation.get("ood", {}).get(name, {}) for evaluation in group.evaluations]
    return list(dict.fromkeys(score for scores in known for score in scores))


def results(group: Group, name: str, score: str) -> list[dict[str, Any]]:
    found = (evaluation.get("ood", {}).get(name, {}).get(score) for evaluation in group.evaluations)
    return [result for result in found if result is not None]


def histograms(group: Group, name: str, score: str) -> tuple[str, str]:
    """The picture, and its AUROC in words."""
    every = results(group, name, score)
    # Of scores without bounds each run has a range of its own: the picture is of the first run then.
    found = [result for result in every if result.get("range") == every[0].get("range")]
    inside, outside = (
        [statistics.fmean(column) for column in zip(*(result["histogram"][side] for result in found), strict=True)]
        for side in (0, 1)
    )
    highest = 100 * max(*inside, *outside)
    low, high = found[0].get("range", (0.0, 1.0))
    panel = Panel(svg.span("score", low, high, 2), svg.axis("% of images", (0, highest), 3), 184, 132, 10)
    panel.area(steps(inside, low, high), 0, "inside")
    panel.area(steps(outside, low, high), 0, "outside")
    auroc = f"AUROC {100 * statistics.fmean(result['auroc'] for result in every):.1f}"
    means = [
        low + (high - low) * sum((place + 0.5) / len(side) * share for place, share in enumerate(side))
        for side in (inside, outside)
    ]
    seen = (
        f"{group.label}, {OOD_SCORES.get(score, score)}: on average {means[0]:.2f} for test images and {means[1]:.2f} "
        f"for {name}. {auroc}."
    )
    return panel.draw(seen), auroc


def steps(shares: Sequence[float], low: float, high: float) -> list[tuple[float, float]]:
    """The outline of a histogram, in %; it starts and ends at zero."""
    width = (high - low) / len(shares)
    corners = [(low + x * width, 100 * share) for place, share in enumerate(shares) for x in (place, place + 1)]
    return [(low, 0), *corners, (high, 0)]


def rankings(groups: Sequence[Group]) -> str:
    """For each group of sets: the scores of every ensemble, the best first."""
    found = [evaluation.get("ood_groups", {}) for group in groups for evaluation in group.evaluations]
    return "".join(ranking(groups, name) for name in dict.fromkeys(name for names in found for name in names))


def ranking(groups: Sequence[Group], name: str) -> str:
    def of(group: Group, score: str, *path: str | int) -> Pooled | None:
        known = (evaluation.get("ood_groups", {}).get(name) for evaluation in group.evaluations)
        scores = (entry["scores"].get(score) for entry in known if entry)
        return pool(dig(own, path) for own in scores if own)

    entries = [(group, score, of(group, score, "auroc")) for group in groups for score in OOD_SCORES]
    ranked = sorted(
        ((group, score, auroc) for group, score, auroc in entries if auroc is not None), key=lambda e: -e[2].mean
    )
    rows = []
    for group, score, auroc in ranked:
        lower, upper = (of(group, score, "auroc_interval", side) for side in (0, 1))
        assert lower is not None and upper is not None
        rows.append(
            f'<tr><th scope="row">{escape(OOD_SCORES[score])}</th><td class="text">{escape(group.label)}</td>'
            f"{cell(auroc, 2, 100)}<td>{100 * lower.mean:.2f} – {100 * upper.mean:.2f}</td>"
            + "".join(cell(of(group, score, key), 2, 100) for key in ("fpr95", "fpr95_ood_positive"))
            + "</tr>"
        )
    sets = next(e["ood_groups"][name] for g in groups for e in g.evaluations if name in e.get("ood_groups", {}))
    lacking = f", without {', '.join(sets['missing'])} (not found)" if sets["missing"] else ""
    titles = ("AUROC ↑", "95 % interval over images", *(measure.title + measure.arrow for measure in OOD[:2]))
    head = '<th scope="col">score</th><th scope="col" class="text">ensemble</th>'
    head += "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    caption = f"Scores ranked, {name}: means over {', '.join(sets['sets'])}{lacking}, in %"
    return table(caption, f"<tr>{head}</tr>", [("", rows)], 6)


def measures(groups: Sequence[Group], name: str) -> str:
    rows = [(group, score) for group in groups for score in scores_of(group, name)]
    columns = [
        [pool(result.get(measure.name) for result in results(group, name, score)) for group, score in rows]
        for measure in OOD
    ]
    best = [best_of(values, measure) for measure, values in zip(OOD, columns, strict=True)]
    lines = [
        f'<tr><th scope="row">{escape(group.label)}</th><td class="text">{escape(OOD_SCORES.get(score, score))}</td>'
        + "".join(
            cell(values[place], measure.decimals, measure.scale, is_best[place])
            for measure, values, is_best in zip(OOD, columns, best, strict=True)
        )
        + "</tr>"
        for place, (group, score) in enumerate(rows)
    ]
    titles = "".join(f'<th scope="col">{escape(measure.title + measure.arrow)}</th>' for measure in OOD)
    head = f'<tr><th scope="col">ensemble</th><th scope="col" class="text">score</th>{titles}</tr>'
    return table(f"Test images against {name}, all in %", head, [("", lines)], 2 + len(OOD))


def mean_auroc(group: Group, sets: Sequence[str], score: str) -> Pooled | None:
    """The mean over the sets, pooled over the runs that have the score."""

    def read(evaluation: dict[str, Any]) -> float | None:
        found = [evaluation["ood"][name].get(score) for name in sets]
        return statistics.fmean(scores["auroc"] for scores in found) if found and all(found) else None

    return group.pooled(read)


def common_sets(groups: Sequence[Group]) -> list[str]:
    """OOD sets that every evaluated run has, so that means over them are comparable."""
    evaluations = [evaluation for group in groups for evaluation in group.evaluations]
    every = [set(evaluation.get("ood", {})) for evaluation in evaluations]
    return sorted(set.intersection(*every)) if every else []
