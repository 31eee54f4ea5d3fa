"""Classify images or vectors: class, confidence, disagreement of the members, and an OOD score.

Examples:
    python -m dicedist.predict run=runs/NAME photo.jpg scans/ 'more/**/*.png'    files, folders, patterns
    find scans -newer last | python -m dicedist.predict run=runs/NAME -          a list of files, one per line
    python -m dicedist.predict run=runs/NAME photos/ format=jsonl output=predictions.jsonl
    python -m dicedist.predict run=runs/NAME photos/ members=student
    python -m dicedist.predict --nproc auto run=runs/NAME photos/                a process on each GPU; or a number
    python -m dicedist.predict run=runs/NAME table.csv    vectors (.npz, .safetensors, .csv, .parquet), one line a row

Images may have any format and size: the short side is scaled to the size used in training, and the center is cropped.

    probabilities  of every class (jsonl only), after temperature: the largest of them is the confidence
    confidence     0..1, calibrated by the run's evaluation
    disagreement   0..1, the share of pairs of members that predict different classes
    entropy, mutual information     in nats (jsonl only), before temperature: all the uncertainty, and its part that
                   members disagree about
    fused_label    of the fused classifier, if the method trains one (jsonl only); other fields are of the members' mean
    ood score      low for images unlike those that the run was trained on; by default KNN, 0..1: how near the features
                   of training images are (calibration.ood_score)

For an unreadable image the line holds the reason. The exit code is 0 if any image could be read, else 2.
A file whose name looks like key=value is written ./key=value.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dicedist.cluster.process import command, tune_malloc
from dicedist.cluster.spread import spread
from dicedist.config import compose_request, show_help
from dicedist.config.requests import PredictRequest
from dicedist.console.lines import note, plural

if TYPE_CHECKING:
    from dicedist.evaluation.ensemble import Ensemble
    from dicedist.evaluation.prediction import Row

SETTING = re.compile(r"--?\w|[\w.]+=")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "predict", PredictRequest)
        return
    arguments = spread("predict", arguments)
    request = compose_request("predict", [word for word in arguments if SETTING.match(word)], PredictRequest)
    if request.run is None:
        raise ValueError("write run=runs/NAME and images: files, folders, patterns, or - for a list on standard input")
    # Not above: importing torch takes seconds.
    from dicedist.cluster.devices import device_named
    from dicedist.cluster.world import joined
    from dicedist.evaluation.loading import load_requested
    from dicedist.evaluation.prediction import files_named, in_turn, reading
    from dicedist.runs.run import Run

    source = Run.open(request.run)
    with joined(source.config().distributed.timeout) as world:
        # One rank looks for files: standard input can be read once.
        named = [word for word in arguments if not SETTING.match(word)]
        paths = world.control.broadcast({"paths": files_named(named) if world.reports else []})["paths"]
        ensemble = load_requested(source, request).to(device_named(request.device))
        tune_malloc()
        names, batches = reading(ensemble, paths, source.config().data.label_column, request.batch_size)
        rows = in_turn(batches, len(names), request.batch_size, world.control)
        if world.reports:
            note(f"members {ensemble.about.members} of step {ensemble.about.step} of {source}")
            write_answers(rows, names, ensemble, request)
        else:
            for _ in rows:  # predicted here, written by the reporter
                pass


def write_answers(
    rows: "Generator[list[Row]]", names: Sequence[str], ensemble: "Ensemble", request: PredictRequest
) -> None:
    from dicedist.evaluation.about import VECTORS
    from dicedist.evaluation.prediction import Table, json_line, write

    noun = "vector" if ensemble.about.images == VECTORS else "image"
    if request.output:
        Path(request.output).parent.mkdir(parents=True, exist_ok=True)
    with (
        open(request.output, "w", encoding="utf-8") if request.output else contextlib.nullcontext(sys.stdout) as stream
    ):
        layout: Callable[[Row], str] = json_line
        if request.format != "jsonl":
            layout = table = Table(names, ensemble.about.class_names, ensemble.about.calibration is not None)
            print(table.header, file=stream)
        predicted = write(rows, len(names), layout, stream, f"{noun}s")
    if request.output:
        unread = f", {len(names) - predicted} could not be read" if predicted < len(names) else ""
        print(f"wrote {request.output}: {plural(predicted, noun)}{unread}")


if __name__ == "__main__":
    command(run)
