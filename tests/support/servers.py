"""Servers on loopback, and mirrors of runs."""

import socket

from dicedist.runs.run import Run
from dicedist.tracking.mlflow.mirror import Mirror
from dicedist.tracking.mlflow.store import chosen_store


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mirror_of(directory):
    """A mirror of the run to the store that its config names."""
    config = Run(directory).config()
    return Mirror(Run(directory), config, chosen_store(config.tracking.uri))
