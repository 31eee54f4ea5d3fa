"""Send a run's records to MLflow: training starts this beside itself, and by hand it sends what a server missed.

Example:
    python -m dicedist.mirror runs/NAME

A process of its own that only reads the run's folder: a slow or dead server costs training nothing, lines wait on the
disk until they are received, and a training that was killed is still marked as failed. How much was received is
kept in mirror.json, so a run that resumes continues the same MLflow run and sends no line twice.
"""

import os
import signal
from collections.abc import Sequence

from dicedist.cluster.process import command


def run(arguments: Sequence[str]) -> None:
    names = [argument for argument in arguments if not argument.startswith("-")]
    if "--help" in arguments or "-h" in arguments or len(names) != 1:
        print(__doc__)
        return
    from dicedist.runs.run import Run  # not above: torch takes seconds, which help and refusals need not
    from dicedist.tracking.mlflow.mirror import Mirror, only_one

    sent, follow = Run.open(names[0]), "--follow" in arguments
    if follow:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # it ends after training does
        os.nice(10)
    with only_one(sent, wait=follow):
        mirror = Mirror(sent, sent.config())
        if follow:
            mirror.follow()
        received = mirror.finish()
    if not received:
        raise ValueError(f"MLflow did not answer; `python -m dicedist.mirror {sent}` sends the rest")


if __name__ == "__main__":
    command(run)
