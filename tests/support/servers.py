"""Servers on loopback, and mirrors of runs."""

import socket

from dicedist.runs.run import Run
from dicedist.tracking.mlflow.mirror import Mirror


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mirror_of(directory):
    return Mirror(Run(directory), Run(directory).config())
