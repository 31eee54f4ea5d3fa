"""Training dynamics: curves of training and validation records over epochs."""

from collections.abc import Sequence
from dataclasses import dataclass

from dicedist.config import names
from dicedist.metrics.measures import DIVERSITY, ENSEMBLE, Measure
from dicedist.reporting import svg
from dicedist.reporting.lines import Line, Reference, line_chart
from dicedist.reporting.markup import Section
from dicedist.reporting.records import Group
from dicedist.reporting.svg import Figure

IMAGES = {names.VALIDATION: "validation", names.TRAINING_IMAGES: "training images"}


@dataclass(frozen=True)
class Course:
    record: str
    title: str
    unit: str
    scale: float = 1
    reference: Reference | None = None


def validated(whose: str, measure: Measure, of: str = "", on: str = names.VALIDATION) -> Course:
    unit = f", {measure.unit}" if measure.unit else ""
    title = f"{measure.title[0].upper()}{measure.title[1:]}{of}{measure.arrow}"
    return Course(names.record(on, whose, measure.name), title, f"{IMAGES[on]}{unit}", measure.scale)


ACCURACY, NATS = ENSEMBLE[0], names.REDUNDANCY_NATS
NOTHING_SHARED = (0.0, "nothing shared")
MAIN = (
    *(validated(names.ENSEMBLE, measure, " of the ensemble") for measure in ENSEMBLE if measure.quick),
    validated(names.MEMBERS, ACCURACY, " of the members"),
    Course(
        names.train(NATS),
        "Redundancy",
        "w's own estimate, clipped first term, training, nats",
        reference=NOTHING_SHARED,
    ),
    Course(
        names.validation(NATS),
        "Redundancy, held out",
        "w's own estimate, both terms, validation, nats",
        reference=NOTHING_SHARED,
    ),
    *(validated(names.DIVERSITY, measure) for measure in DIVERSITY if measure.summary),
)
FOLDED = {
    "Other measures of diversity": [validated(names.DIVERSITY, m) for m in DIVERSITY if not m.summary],
    "Diversity on training images, to compare with validation": [
        validated(names.DIVERSITY, m, " of training images", names.TRAINING_IMAGES) for m in DIVERSITY
    ],
    "Schedules and gradients": [
        Course(names.schedule("learning_rate"), "Learning rate", "of the members"),
        Course(names.schedule("log_beta"), "log(β)", "compression weighs 1/β"),
        Course(names.schedule("ramp_up"), "Ramp-up", "share of the weight that counts"),
        Course(names.schedule("delta"), "δ", "weight of the redundancy, before the ramp-up"),
        Course(names.schedule("covariance"), "Covariance for w", "0: noise of variance 1, 1: the predicted scale"),
        Course(names.train(names.MEMBERS, names.GRADIENT_NORM), "Gradient norm", "mean over members, training"),
    ],
}


def section(groups: Sequence[Group]) -> Section:
    main = [chart(groups, course) for course in MAIN]
    others = {title: [chart(groups, course) for course in courses] for title, courses in FOLDED.items()}
    absent = [course.title.rstrip(" ↑↓") for course, figure in zip(MAIN, main, strict=True) if figure is None]
    values = {"groups": groups, "main": main, "others": others, "absent": absent}
    return Section("report/dynamics", "Training dynamics", values)


def chart(groups: Sequence[Group], course: Course) -> Figure | None:
    lines = [Line(group.label, group.style, group.curve(course.record, course.scale)) for group in groups]
    last = max((record["epoch"] for group in groups for run in group.runs for record in run.records), default=0)
    return line_chart(course.title, lines, svg.span("epoch", 0, last), course.unit, reference=course.reference)
