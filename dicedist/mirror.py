"""Send a run to a tracker. Training starts this as a separate process; by hand it sends what a server missed.

Examples:
    python -m dicedist.mirror runs/NAME                                     to $MLFLOW_TRACKING_URI, or ./mlflow.db
    python -m dicedist.mirror runs/NAME tracking.uri=http://HOST:5000       to another server of MLflow
    python -m dicedist.mirror runs/NAME tracking=tensorboard                to an event file in the run's folder
    python -m dicedist.mirror runs/NAME tracking=wandb                      to Weights & Biases
    python -m dicedist.mirror runs/NAME network.trusted=true                may import the run's own network

The mirror only reads records and results of the run, and synchronizes the tracker with them. So a slow or dead server
does not delay training, and a killed training is marked as failed. mirror.json stores how much was received, so a
resumed run continues the same run in the tracker and sends no line twice. The exit code is 0 if the tracker has
received everything.
"""

import logging
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from dicedist.cluster.process import command
from dicedist.config import nearest
from dicedist.config.extras import require
from dicedist.config.schema import TRACKERS

SETTINGS = ("tracking", "tracking.uri", "network.trusted")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    name, settings = parse(arguments)
    tracker = settings.get("tracking", "mlflow")
    require(tracker, "dicedist mirror")
    from dicedist.runs.lock import locked  # not above: importing torch takes seconds
    from dicedist.runs.run import Run
    from dicedist.tracking.mirror import Mirror, destination_of
    from dicedist.tracking.mlflow.store import chosen_store, refuse_another_store

    sent, follow = Run.open(name), "--follow" in arguments
    if follow:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the mirror ends after training
        os.nice(10)
    elif tracker == "mlflow" and "tracking.uri" not in settings:
        refuse_another_store(sent, chosen_store(None))
    config = sent.config()
    network = replace(config.network, trusted=settings.get("network.trusted") == "true")
    tracking = replace(config.tracking, uri=settings.get("tracking.uri"))  # a run's folder never chooses the server
    config = replace(config, network=network, tracking=tracking)
    # A training may restart before the mirror of its last attempt has ended, so the new mirror waits.
    with locked(sent.mirror_lock_file(tracker), None if follow else f"the records of {sent} are being sent already"):
        destination = destination_of(tracker, sent, config)
        mirror = Mirror(destination)
        if follow:
            mirror.follow()
        received = mirror.finish()
    title = destination.title
    if not received:
        raise ValueError(f"{title} has not received all of {sent}; `{destination.remedy}` sends the rest")
    if not follow:
        run_id = f", run {mirror.state['run_id']}" if mirror.state["run_id"] else ""
        print(f"{sent} is in {title} at {destination.shown}: {sent.ending()}{run_id}")


def parse(arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the name of the run and the settings; ValueError if one of them is wrong."""
    words = [word for word in arguments if not word.startswith("-")]
    settings = dict(word.split("=", 1) for word in words if word.startswith(tuple(f"{name}=" for name in SETTINGS)))
    names = [word.removeprefix("run=") for word in words if word.partition("=")[0] not in settings]
    if unknown := [name for name in names if re.match(r"[\w.]+=", name)]:
        raise ValueError(f"{unknown[0]}: there is no such key{nearest(unknown[0].partition('=')[0], SETTINGS)}")
    if len(names) != 1:
        raise ValueError("name one run to send: python -m dicedist.mirror runs/NAME [tracking.uri=URI]")
    if (tracker := settings.get("tracking", "mlflow")) not in TRACKERS:
        raise ValueError(f"tracking={tracker}: write one of {', '.join(TRACKERS)}")
    return names[0], settings


if __name__ == "__main__":
    logging.getLogger("dicedist.data").setLevel(logging.ERROR)  # training has already warned of skipped images
    command(run)
