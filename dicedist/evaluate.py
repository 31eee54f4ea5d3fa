"""Evaluate an ensemble."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from dicedist import metrics
from dicedist.config import Config
from dicedist.data.sources import Source
from dicedist.exchange import Exchange
from dicedist.inference import read
from dicedist.parts import Hosted
from dicedist.tables import table

EVALUATION_BATCH = 500


def assess(config: Config, hosted: Hosted, exchange: Exchange, source: Source, directory: Path, say: Callable) -> None:
    """All ranks call: every measure on the test set, to evaluation.json and as tables from rank 0."""
    readings = read(hosted, source.test, source, EVALUATION_BATCH, exchange.device)
    shape = (len(source.test.labels_N), source.num_classes)
    logits = exchange.collect(
        {member: reading.logits_NK for member, reading in readings.items()}, [shape] * exchange.placement.num_members
    )
    if logits is None:
        return
    measures = metrics.measure(torch.stack(logits), source.test.labels_N)
    (directory / "evaluation.json").write_text(json.dumps(measures, indent=1))
    say(json.dumps(measures)[:600])
