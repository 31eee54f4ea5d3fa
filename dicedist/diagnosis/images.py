"""Compare the images of each pipeline on the accepted device with torch's on the CPU, for the same draws.

Run by acceptance.py: `python -m dicedist.diagnosis.images FILE key=value`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dicedist.cluster.devices import pick_device
from dicedist.cluster.process import command
from dicedist.config import compose_config
from dicedist.data import pipeline, sources, uses_dali
from dicedist.data.pipeline import Loader

BATCHES = 3


def run(arguments: Sequence[str]) -> None:
    """Write the largest difference of a pixel for each pipeline; pixels have a deviation of about 1.

    DALI is left out if it cannot be imported.
    """
    file, *keys = arguments
    config, found = compose_config(keys), {}
    source = sources.load(config.data)

    def views(name: str, device: torch.device) -> list[torch.Tensor]:
        settings = replace(config.data, pipeline=name)
        loader = Loader(source.train, settings, source, config.batch_size, config.seed, device, [0])
        made = [batch.images[0].cpu().clone() for _, batch in zip(range(BATCHES), loader.epoch(0), strict=False)]
        loader.close()
        return made

    expected = views("torch", torch.device("cpu"))
    ways = [("torch, from memory", "torch", 0), ("torch, images on the device", "torch", pipeline.RESIDENT)]
    if uses_dali(replace(config.data, pipeline="auto")):
        ways.append(("DALI", "dali", 0))
    for name, chosen, room in ways:
        pipeline.RESIDENT = room
        pairs = zip(views(chosen, pick_device()), expected, strict=True)
        found[name] = max(float((one - other).abs().max()) for one, other in pairs)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    command(run)
