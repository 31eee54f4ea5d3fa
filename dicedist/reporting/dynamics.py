"""Training dynamics: what the records of training and validation say, epoch by epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.reporting import svg
from dicedist.reporting.lines import Line, Reference, line_chart
from dicedist.reporting.markup import Section, ensembles, figure, folded, grid, remark
from dicedist.reporting.records import Group


@dataclass(frozen=True)
class Course:
    record: str
    title: str
    unit: str
    scale: float = 1


MAIN = (
    Course("val/ensemble/accuracy", "Ensemble accuracy", "accuracy on validation images, %", 100),
    Course("val/members/accuracy", "Individual accuracy", "mean accuracy of the members, validation, %", 100),
    Course("val/ensemble/nll", "Negative log-likelihood", "NLL of the ensemble, validation, nats"),
    Course("val/ensemble/ece", "Calibration error", "ECE of the ensemble, validation, %", 100),
    Course("train/redundancy", "Redundancy", "estimate by the discriminator, training, nats"),
    Course("val/diversity/ratio_error", "Diversity", "ratio-error: single per shared error, validation"),
)
OTHER_DIVERSITY = (
    Course("val/diversity/q_statistic", "Q-statistic (low is diverse)", "mean over pairs, validation"),
    Course("val/diversity/agreement", "Agreement (low is diverse)", "pairs that predict the same class, %", 100),
    Course("val/diversity/kohavi_wolpert", "Kohavi–Wolpert variance", "variance of being right, validation"),
    Course("val/diversity/entropy", "Entropy (high is diverse)", "disagreement, 0 to 1, validation"),
)


def section(groups: Sequence[Group]) -> Section:
    main, absent = charts(groups, MAIN)
    other, _ = charts(groups, OTHER_DIVERSITY)
    body = ensembles(groups) + grid(main) if main else ""
    if other:
        body += folded("Other measures of diversity", grid(other))
    if absent:
        body += remark(f"Not in the records of these runs: {', '.join(absent)}.")
    return Section(
        "dynamics",
        "Training dynamics",
        "One line for each ensemble, the mean over its seeds; the band is one deviation to either side. Long "
        "records are averaged over neighbours. Redundancy that falls while ratio-error rises is DICE at work; too much "
        "of it costs individual accuracy.",
        body,
    )


def charts(groups: Sequence[Group], courses: Sequence[Course]) -> tuple[list[str], list[str]]:
    """Figures of what was recorded, and names of what was not."""
    pictures = [(course, chart(groups, course)) for course in courses]
    drawn = [figure(course.title, picture) for course, picture in pictures if picture]
    return drawn, [course.title.lower() for course, picture in pictures if not picture]


def chart(groups: Sequence[Group], course: Course, reference: Reference | None = None) -> str | None:
    lines = [Line(group.label, group.style, group.curve(course.record, course.scale)) for group in groups]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    last = max(record["epoch"] for group in groups for run in group.runs for record in run.records)
    return line_chart(course.title, lines, svg.span("epoch", 0, last), course.unit, reference=reference)
