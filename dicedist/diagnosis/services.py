"""Checks beyond this process: other ranks and nodes, the data, the bucket, MLflow."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from dicedist.config.schema import Config
from dicedist.console.lines import redacted
from dicedist.data import sources
from dicedist.data.prepared import home, refuse_unwritable
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, Finding, judged
from dicedist.runs.bucket import Bucket
from dicedist.tracking.mlflow.store import chosen_store, folder_of

SECONDS = 5.0


def ranks_reach_each_other(ranks: int) -> Finding:
    """Start the ranks as a training would, and let them exchange messages."""
    if ranks == 1:
        return Finding(SKIPPED, "one rank sends no messages; write --ranks 2 to test two GPUs, or two CPU processes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "links.json")
        command = [sys.executable, "-m", "dicedist.launch", f"--nproc_per_node={ranks}", "--max-restarts=0"]
        command += ["-m", "dicedist.diagnosis.links", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
        if ended.returncode or not file.exists():
            said = " ".join(ended.stderr.split())[-250:] or f"exit code {ended.returncode}"
            remedy = "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_P2P_DISABLE=1 avoids broken peer links"
            return judged(f"{ranks} ranks: {said}", remedy, state=FAILED)
        seen = json.loads(file.read_text())
    what = f"{ranks} ranks over {seen['backend']}: all to one and one to all in {seen['milliseconds']:.1f} ms"
    wrong = "" if seen["right"] else "values arrive changed: NCCL_P2P_DISABLE=1, then suspect the GPUs' links"
    return judged(what, wrong, state=FAILED)


def own_name() -> Finding:
    name = socket.gethostname()
    try:
        return judged(f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        return judged(f"{name} has no address", f"add it to /etc/hosts: 127.0.1.1 {name}")


def ports() -> Finding:
    """Check that this node answers on a port that the system chooses: ranks find each other by node name and port."""
    name = socket.gethostname()
    try:
        with socket.create_server(("", 0)) as listening:
            port = listening.getsockname()[1]
            socket.create_connection((name, port), timeout=SECONDS).close()
    except OSError as error:
        remedy = "the firewall must let ranks connect to each other on any port above 1024, also on one node"
        return judged(f"{name} does not answer itself: {error}", remedy)
    return judged(f"{name} answers on port {port}")


def reaches(node: str) -> Finding:
    """Check that a node resolves. node: HOST or HOST:PORT; with a port, a process must listen there."""
    host, _, port = node.partition(":")
    try:
        address = socket.gethostbyname(host)
        if port:
            socket.create_connection((address, int(port)), timeout=SECONDS).close()
    except OSError as error:
        remedy = "names must resolve on every node, and the firewall must let nodes reach each other"
        return judged(str(error), remedy, state=FAILED)
    return judged(f"is {address}" + (f", port {port} answers" if port else ""))


def data_root(config: Config) -> Finding:
    root = Path(config.data.root).expanduser() if config.data.root else home()
    try:
        source = sources.load(config.data, labels_only=True)
    except (ValueError, OSError) as error:
        return judged(f"{config.data.name} in {root}: {error}", "see docs/data.md, or write data.root=FOLDER")
    return judged(f"{config.data.name}: {len(source.train):,} training images in {root}")


def bucket(config: Config) -> Finding:
    """Write a small file to run.remote, read it back and remove it, as a training does when it begins."""
    if config.run.remote is None:
        return Finding(SKIPPED, "run.remote is not set: runs are kept in their folder alone")
    where = f"run.remote={redacted(config.run.remote)}"
    try:
        found = Bucket.of(config)
        assert found is not None
        found.refuse_unwritable(where)
    except ValueError as error:
        return judged(str(error), "install what is missing, or check the bucket and its credentials", state=FAILED)
    return judged(f"{where} can be written and read")


def mlflow_store(config: Config) -> Finding:
    if "mlflow" not in config.tracking.trackers:
        return Finding(SKIPPED, f"tracking={config.tracking.to} sends nothing there")
    uri = chosen_store(config.tracking.uri)
    folder = folder_of(uri)
    if folder is not None:
        refuse_unwritable(folder, "write tracking.uri=...")
        return Finding(OK, f"{redacted(uri)} can be written to")
    if not uri.startswith(("http://", "https://")):
        return Finding(SKIPPED, f"{redacted(uri)} is neither a file nor a server of MLflow's own")
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SECONDS) as answer:
            return judged(f"{redacted(uri)} answers {answer.status}")
    except (OSError, urllib.error.URLError) as error:
        remedy = (
            "runs are kept in their folders and sent later (dicedist mirror RUN); start the server, or tracking=none"
        )
        return judged(f"{redacted(uri)}: {redacted(str(error))}", remedy)
