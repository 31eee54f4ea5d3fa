"""The model card of an ensemble: description, data, measures with intervals, calibration, limits and figures.

The text is Markdown, as model hubs show it. Values of a run are escaped, so they cannot end a cell or begin markup.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dicedist import __version__
from dicedist.config import Config
from dicedist.evaluation.about import VECTORS, About
from dicedist.evaluation.promises import MEANING, chosen_on, promises
from dicedist.metrics.measures import ENSEMBLE, OOD_SCORES, Measure
from dicedist.metrics.scoring import ensemble_log_probabilities
from dicedist.metrics.statistics import Interval, bootstrap

FIGURES = "figures"  # the folder of the drawings, next to the card
NAMED_CLASSES = 30
RESAMPLES = 1000, 200  # for means over inputs, and for measures that must be computed for every resample


class Drawing(Protocol):
    @property
    def title(self) -> str: ...
    @property
    def svg(self) -> str: ...


class Evaluated(Protocol):
    """A run that was evaluated, as `dicedist.Run.open` and `dicedist.fit` return it."""

    @property
    def logits_file(self) -> Path: ...
    @property
    def results(self) -> dict[str, Any]: ...
    def tensors(self, path: Path, result: Mapping[str, Any]) -> dict[str, Tensor]: ...
    def config(self) -> Config: ...
    def figures(self) -> Mapping[str, Drawing]: ...


def write(about: About, name: str, run: Evaluated | None) -> str:
    """Return the text below the metadata. name: the name for `Ensemble.from_pretrained`."""
    parts = [heading(about, name), *([] if run is None else evaluated(run)), limits(about)]
    if run is not None:
        parts += [f"![{plain(drawn.title)}]({FIGURES}/{file}.svg)" for file, drawn in run.figures().items()]
    return "\n\n".join(parts) + "\n"


def heading(about: About, name: str) -> str:
    kinds = ", ".join(sorted({plain(network) for network in about.networks}))
    width, side = len(about.mean), about.size
    inputs = f"Inputs are images of {side} x {side} pixels and {width} channels: {plain(about.preparation)}."
    if about.images == VECTORS:
        inputs = f"Inputs are vectors of {width} numbers."
    trusted = f", trusted=True)  # imports and runs {plain(about.target)}" if about.target else ")"
    classes = ", ".join(plain(label) for label in about.class_names[:NAMED_CLASSES])
    others = len(about.class_names) - NAMED_CLASSES
    return f"""# {plain(name)}

An ensemble of {len(about.members)} networks ({kinds}) that predict together, written by dicedist {__version__}.
{inputs} The networks' {about.average} are averaged.

```python
from dicedist import Ensemble

ensemble = Ensemble.from_pretrained("{name}"{trusted}
answers = ensemble.predict(inputs)
print(answers.names, answers.confidence, answers.ood_score)
```

{len(about.class_names)} classes: {classes}{f" and {others} more" if others > 0 else ""}."""


def evaluated(run: Evaluated) -> Iterator[str]:
    result = run.results
    saved = run.tensors(run.logits_file, result)
    labels_N = saved["labels"].long()
    log_p_NK = ensemble_log_probabilities(saved["logits"], result.get("average", "logits"))
    rows = [[measure.column, *cells(measure, interval_of(measure, log_p_NK, labels_N))] for measure in ENSEMBLE]
    data = plain(run.config().data.name)
    yield f"## Measures\n\nOn {len(labels_N):,} test inputs of the data `{data}`, before any temperature."
    yield table(["measure", "value", "95 % interval over test inputs"], rows)
    outside = [
        [plain(name), plain(OOD_SCORES.get(score, score)), percent(own["auroc"]), between(own.get("auroc_interval"))]
        for name, scores in result["ood"].items()
        for score, own in scores.items()
    ]
    if outside:
        yield "OOD detection: how well each score separates inputs of other data from the test inputs:"
        yield table(["other data", "score", "AUROC, %", "95 % interval"], outside)
    found = result.get("calibration")
    yield "## Calibration"
    if found is None:
        yield "The ensemble is not calibrated: confidences come directly from the networks."
        return
    on_test = " These are the test inputs, so the last column is too optimistic." if found["source"] == "test" else ""
    yield f"The decisions of `predict` were {chosen_on(found)}.{on_test} {MEANING}."
    yield table(
        ["what predict does", "promised", "on the test set"],
        [[plain(cell) for cell in (each.what, each.promised, each.tested)] for each in promises(found)],
    )


def interval_of(measure: Measure, log_p_NK: Tensor, labels_N: Tensor) -> Interval:
    function: Any = measure.per_input or measure.function
    return bootstrap(function, log_p_NK, labels_N, num_resamples=RESAMPLES[measure.per_input is None])


def cells(measure: Measure, found: Interval) -> list[str]:
    assert found.lower is not None and found.upper is not None  # the bootstrap knows both
    value, lower, upper = (f"{measure.scale * x:.{measure.decimals}f}" for x in (found.mean, found.lower, found.upper))
    return [value, f"{lower} to {upper}"]


LIMITS = """## Limits

- Every input gets one of the classes, even if it belongs to none of them. `ood_score` is low for many such inputs, but
  not for all.
- Measures and promises hold for inputs like the test and held-out inputs. They say nothing about other cameras, places
  or people.
- Intervals cover the choice of test inputs. They do not cover the difference between two trainings."""
UNCALIBRATED = "- Nothing was calibrated: confidences are not frequencies."


def limits(about: About) -> str:
    return LIMITS if about.calibration else f"{LIMITS}\n{UNCALIBRATED}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def between(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{percent(ends[0])} to {percent(ends[1])}"


def plain(text: object) -> str:
    """Return one line, with the special characters of Markdown and HTML escaped."""
    line = " ".join(str(text).split())
    return "".join(f"&#{ord(letter)};" if letter in "|<>&[]`*" else letter for letter in line)
