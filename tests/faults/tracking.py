"""Faults around MLflow: training neither waits nor ends, and in the end MLflow has every record once."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from tests.faults.files import fill, flip_a_bit, small_disk, truncate
from tests.faults.processes import kill_one_of
from tests.faults.subject import UNSENT
from tests.support import CHECKOUT
from tests.support.servers import Between, Server
from tests.support.tiny import records_of

_making = threading.Lock()


def tracked(run, uri):
    run.settings = (*run.settings, "tracking=mlflow", f"tracking.uri={uri}", "tracking.model=null")
    run.uri = uri


def database(folder):
    return f"sqlite:///{folder}/mlflow.db"


@functools.cache
def made_server():
    """One for all rounds: it needs seconds to start."""
    made = Server(Path(tempfile.mkdtemp(prefix="dicedist-mlflow-")))
    made.start()
    atexit.register(made.kill)
    return made


def server():
    with _making:
        return made_server()


def unsent(run):
    """Return whether the run ended with the code and the line of a run that is complete but not sent."""
    return run.wait() == UNSENT and "MLflow has not received all of it" in run.told()


def sent_by_hand(run):
    words = [sys.executable, "-m", "dicedist.mirror", str(run.run), f"tracking.uri={run.uri}"]
    done = subprocess.run(words, cwd=CHECKOUT, check=False, capture_output=True, text=True)
    with run.log.open("a") as log:
        log.write(done.stdout + done.stderr)
    return done.returncode == 0


def received_all(run):
    """MLflow's history is metrics.jsonl, once and in full, its results those of evaluation.json; it is FINISHED."""
    from mlflow import MlflowClient

    client, run_id = MlflowClient(run.uri), json.loads((run.run / "mirror.json").read_text())["run_id"]
    name = "train/members/loss"
    written = [(record["step"], record[name]) for record in records_of(run.run) if name in record]
    history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))
    accuracy = json.loads((run.run / "evaluation.json").read_text())["ensemble"]["accuracy"]
    found = client.get_run(run_id)
    assert history == written, f"MLflow has {history}, the run {written}"
    assert found.info.status == "FINISHED" and found.data.metrics["test/ensemble/accuracy"] == accuracy, found
    return "Traceback" not in run.told()


def kill_the_mirror(run, draws):
    """The run says that not all arrived, and the command that it names sends the rest."""
    tracked(run, database(run.directory))
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    for process in mirrors(run):
        process.kill()
    return unsent(run) and sent_by_hand(run) and received_all(run)


def mirrors(run):
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"dicedist.mirror", str(run.run)} <= set(process.info["cmdline"] or [])
    ]


def kill_a_rank(run, draws):
    """One run in MLflow, with every record once."""
    tracked(run, database(run.directory))
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    kill_one_of(run, draws)
    return run.recovers() and received_all(run)


def bad_server(manner, heals):
    """From some record on. heals: the server is well again before training ends; otherwise the rest is sent later."""

    def fault(run, draws):
        between = Between(server().port)
        tracked(run, between.uri)
        run.start(("tests.support.faulty", "impatient", "0", "0"))
        run.wait_for_records(draws.randint(1, 6))
        between.behave(manner)
        if heals:
            run.wait_for(lambda: manner == "gone" or between.refused)
            run.wait_for_records(draws.randint(8, 14))
            between.behave("well")
            return run.recovers() and received_all(run)
        ended = unsent(run)
        between.behave("well")
        return ended and sent_by_hand(run) and received_all(run)

    return fault


def fill_the_store(run, draws):
    """The disk of MLflow's database is full for the rest of the run."""
    folder = run.directory / "store"
    with small_disk(folder, "6m"):
        tracked(run, database(folder))
        run.start(("tests.support.faulty", "impatient", "0", "0"))
        run.wait_for(lambda: (run.run / "mirror.json").exists())
        filler = fill(folder)
        ended = unsent(run)
        filler.unlink()
        return ended and sent_by_hand(run) and received_all(run)


def damage_its_state(run, draws):
    """mirror.json, while the run is down: MLflow gets a run with every record, by hand if training was over."""
    tracked(run, database(run.directory))
    run.start()
    run.wait_for_records(draws.randint(4, 10))
    run.wait_for(lambda: (run.run / "mirror.json").exists())
    stopped = run.stop(15)
    psutil.wait_procs(mirrors(run))
    draws.choice([truncate, flip_a_bit])(run.run / "mirror.json", draws)
    return stopped and run.finish() and sent_by_hand(run) and received_all(run)
