"""Send a run's records to MLflow: training starts this beside itself, and by hand it sends what a server missed.

Examples:
    python -m dicedist.mirror runs/NAME                                     to $MLFLOW_TRACKING_URI, or ./mlflow.db
    python -m dicedist.mirror runs/NAME tracking.uri=http://HOST:5000       to another server
    python -m dicedist.mirror runs/NAME network.trusted=true                may import the run's own network

It only reads the run's folder, and brings MLflow to what the folder says, whenever it is run: a slow or dead server
costs training nothing, and a training that was killed is marked as failed. How much was received is kept in
mirror.json, so a run that resumes continues the same MLflow run and sends no line twice. The exit code is 0 if MLflow
has received everything.
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

SETTINGS = ("tracking.uri", "network.trusted")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    words = [word for word in arguments if not word.startswith("-")]
    settings = dict(word.split("=", 1) for word in words if word.startswith(tuple(f"{name}=" for name in SETTINGS)))
    names = [word for word in words if word.partition("=")[0] not in settings]
    names = [name.removeprefix("run=") for name in names]
    if unknown := [name for name in names if re.match(r"[\w.]+=", name)]:
        raise ValueError(f"{unknown[0]}: there is no such key{nearest(unknown[0].partition('=')[0], SETTINGS)}")
    if len(names) != 1:
        raise ValueError("name one run to send: python -m dicedist.mirror runs/NAME [tracking.uri=URI]")
    require("mlflow", "dicedist mirror")
    from dicedist.runs.lock import locked  # not above: torch takes seconds, which help and refusals need not
    from dicedist.runs.run import Run
    from dicedist.tracking.mlflow.mirror import Mirror
    from dicedist.tracking.mlflow.store import chosen_store, refuse_another_store

    sent, follow = Run.open(names[0]), "--follow" in arguments
    uri = chosen_store(settings.get("tracking.uri"))
    if follow:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # it ends after training does
        os.nice(10)
    elif "tracking.uri" not in settings:
        refuse_another_store(sent, uri)
    config = sent.config()
    trusted = replace(config.network, trusted=settings.get("network.trusted") == "true")
    config = replace(config, network=trusted)
    # A restarted training may come back before the mirror of its last attempt has ended: its own mirror waits.
    with locked(sent.mirror_lock_file, None if follow else f"the records of {sent} are being sent already"):
        mirror = Mirror(sent, config, uri)
        if follow:
            mirror.follow()
        received = mirror.finish()
    if not received:
        again = f"python -m dicedist.mirror {sent}" + (f" tracking.uri={mirror.shown}" if settings else "")
        raise ValueError(f"MLflow has not received all of {sent}; `{again}` sends the rest")
    if not follow:
        print(f"{sent} is in MLflow at {mirror.shown}: {sent.ending()}, run {mirror.state['run_id']}")


if __name__ == "__main__":
    logging.getLogger("dicedist.data").setLevel(logging.ERROR)  # whoever started this has told of images left out
    command(run)
