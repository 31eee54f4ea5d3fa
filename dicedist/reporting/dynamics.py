"""Training dynamics: what the records of training and validation say, epoch by epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, Measure
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, Reference, line_chart
from dicedist.reporting.markup import Section, ensembles, figure, folded, grid, remark
from dicedist.reporting.records import Group

IMAGES = {"val": "validation", "train_set": "training images"}


@dataclass(frozen=True)
class Course:
    record: str
    title: str
    unit: str
    scale: float = 1


def validated(group: str, measure: Measure, of: str = "", on: str = "val") -> Course:
    unit = f", {measure.unit}" if measure.unit else ""
    title = f"{measure.title[0].upper()}{measure.title[1:]}{of}{measure.arrow}"
    return Course(f"{on}/{group}/{measure.name}", title, f"{IMAGES[on]}{unit}", measure.scale)


ACCURACY = ENSEMBLE[0]
MAIN = (
    *(validated("ensemble", measure, " of the ensemble") for measure in ENSEMBLE if measure.quick),
    validated("members", ACCURACY, " of the members"),
    Course("train/redundancy_nats", "Redundancy", "w's own estimate, clipped first term, training, nats"),
    Course("val/redundancy_nats", "Redundancy, held out", "w's own estimate, both terms, validation, nats"),
    *(validated("diversity", measure) for measure in DIVERSITY if measure.summary),
)
OTHER_DIVERSITY = tuple(validated("diversity", measure) for measure in DIVERSITY if not measure.summary)
TRAINED = tuple(validated("diversity", measure, " of training images", "train_set") for measure in DIVERSITY)
SCHEDULES = (
    Course("schedule/learning_rate", "Learning rate", "of the members"),
    Course("schedule/log_beta", "log(β)", "compression weighs 1/β"),
    Course("schedule/ramp_up", "Ramp-up", "share of the weight that counts"),
    Course("schedule/delta", "δ", "weight of the redundancy, before the ramp-up"),
    Course("schedule/covariance", "Covariance for w", "0: noise of variance 1, 1: the predicted scale"),
    Course("train/members/gradient_norm", "Gradient norm", "mean over members, training"),
)


def section(groups: Sequence[Group]) -> Section:
    main, absent = charts(groups, MAIN)
    other, _ = charts(groups, OTHER_DIVERSITY)
    trained, _ = charts(groups, TRAINED)
    body = ensembles(groups) + grid(main) if main else ""
    if other:
        body += folded("Other measures of diversity", grid(other))
    if trained:
        body += folded("Diversity on training images, to compare with validation", grid(trained))
    steered, _ = charts(groups, SCHEDULES)
    if steered:
        body += folded("Schedules and gradients", grid(steered))
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
    return drawn, [course.title.rstrip(" ↑↓") for course, picture in pictures if not picture]


def chart(groups: Sequence[Group], course: Course, reference: Reference | None = None) -> str | None:
    lines = [Line(group.label, group.style, group.curve(course.record, course.scale)) for group in groups]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    last = max(record["epoch"] for group in groups for run in group.runs for record in run.records)
    return line_chart(course.title, lines, svg.span("epoch", 0, last), course.unit, reference=reference)
