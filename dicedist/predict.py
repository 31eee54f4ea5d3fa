"""What an ensemble makes of images or vectors: class, confidence, disagreement of its members, whether it knows such.

Examples:
    python -m dicedist.predict run=runs/NAME photo.jpg scans/ 'more/**/*.png'    files, folders, patterns
    find scans -newer last | python -m dicedist.predict run=runs/NAME -          a list of files, one a line
    python -m dicedist.predict run=runs/NAME photos/ format=jsonl output=predictions.jsonl
    python -m dicedist.predict run=runs/NAME photos/ members=student
    python -m dicedist.predict run=runs/NAME table.csv    vectors (.npz, .safetensors, .csv, .parquet), one line a row

Images of any format and size: the short side is brought to the size that the run was trained on, the middle is taken.

    probabilities  of every class (jsonl only), after temperature: the largest of them is the confidence
    confidence     0..1, calibrated by the run's evaluation
    disagreement   0..1, the share of pairs of members that predict different classes
    entropy, mutual information     in nats (jsonl only), before temperature: all the uncertainty, and its part that
                   members disagree about
    fused_label    of the fused classifier, where the method trains one (jsonl only); all else is of the members' mean
    ood score      low for images unlike those that the run was trained on; by default KNN, 0..1: how near the features
                   of training images are (calibration.ood_score)

An image that cannot be read is a line that says why. The exit code is 0 if any could be read, 2 if none or refused.
A file whose name looks like key=value is written ./key=value.
"""

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dicedist.cluster.process import command, tune_malloc
from dicedist.config import compose_request, show_help
from dicedist.config.requests import PredictRequest
from dicedist.console.lines import note, plural

SETTING = re.compile(r"--?\w|[\w.]+=")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "predict", PredictRequest)
        return
    request = compose_request("predict", [word for word in arguments if SETTING.match(word)], PredictRequest)
    if request.run is None:
        raise ValueError("write run=runs/NAME and images: files, folders, patterns, or - for a list on standard input")
    # Not above: torch takes seconds, which help and refusals need not.
    from dicedist.cluster.devices import device_named
    from dicedist.evaluation.about import VECTORS
    from dicedist.evaluation.loading import load_ensemble
    from dicedist.evaluation.prediction import (
        Table,
        files_named,
        json_line,
        predict,
        predict_vectors,
        vectors_in,
        write,
    )
    from dicedist.runs.run import Run

    device = device_named(request.device)
    paths = files_named([word for word in arguments if not SETTING.match(word)])
    source = Run.open(request.run)
    ensemble = load_ensemble(
        source,
        request.members,
        request.average,
        trusted=request.network.trusted,
        asked=asdict(request.calibration),
        which=request.checkpoint,
    )
    note(f"members {ensemble.about.members} of step {ensemble.about.step} of {source}")
    tune_malloc()
    noun = "vector" if ensemble.about.images == VECTORS else "image"
    if noun == "vector":
        paths, vectors_NV = vectors_in(paths, source.config().data.label_column, ensemble.about.columns)
        rows = predict_vectors(ensemble.to(device), paths, vectors_NV, request.batch_size)
    else:
        rows = predict(ensemble.to(device), paths, request.batch_size)
    if request.output:
        Path(request.output).parent.mkdir(parents=True, exist_ok=True)
    with (
        open(request.output, "w", encoding="utf-8") if request.output else contextlib.nullcontext(sys.stdout) as stream
    ):
        if request.format == "jsonl":
            predicted = write(rows, len(paths), json_line, stream)
        else:
            table = Table(paths, ensemble.about.class_names, ensemble.about.calibration is not None)
            print(table.header, file=stream)
            predicted = write(rows, len(paths), table, stream)
    if request.output:
        unread = f", {len(paths) - predicted} could not be read" if predicted < len(paths) else ""
        print(f"wrote {request.output}: {plural(predicted, noun)}{unread}")


if __name__ == "__main__":
    command(run)
