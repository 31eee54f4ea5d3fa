"""Faults from outside of a training: others read and write its results, its store and its folder while it trains."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from dicedist.runs import checkpoint
from dicedist.runs.run import Run as Folder
from tests.faults.processes import kill_one_of
from tests.faults.subject import PATIENCE, STEPS
from tests.support import CHECKOUT


def evaluation_of(run, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DICEDIST_DATA": str(run.directory / "home")}
    command = [sys.executable, "-m", "dicedist.evaluate", f"run={run.run}", *words]
    with run.log.open("a") as log:
        return subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)


def results_are_whole(run, step):
    """The files of the results belong together, and are of this step."""
    folder = Folder(run.run)
    result = folder.result(step)
    return result is not None and "logits" in folder.tensors(folder.logits_file, result)


def evaluate_meanwhile(run, draws):
    """`evaluate` reads checkpoints that training removes, and may save its results after training has saved its own."""
    run.start()
    run.wait_for_records(draws.randint(3, 12))
    run.wait_for(lambda: checkpoint.saved(Folder(run.run).checkpoints))
    reading = evaluation_of(run)
    recovered = run.recovers()
    return reading.wait(PATIENCE) == 0 and recovered and not run.restarted() and results_are_whole(run, STEPS)


def evaluate_twice(run, draws):
    """Two evaluations save at about the same moment; then the run is evaluated by its training once more."""
    run.start()
    done = run.wait() == 0
    ends = [one.wait(PATIENCE) for one in [evaluation_of(run), evaluation_of(run)]]
    whole = results_are_whole(run, STEPS)
    Folder(run.run).result_file.unlink()
    return done and ends == [0, 0] and whole and run.finish()


def go_back_and_kill(run, draws):
    """A rank is killed before the first new checkpoint of a run that went back: later ones must not come back."""
    run.start(("dicedist.train",), "checkpoint.keep=20")
    run.wait_for_records(draws.randint(8, 12))
    stopped = run.stop(signal.SIGTERM)
    steps = [checkpoint.step_of(path) for path in checkpoint.saved(Folder(run.run).checkpoints)]
    step, newest, said = steps[0], steps[-1], len(run.told())
    run.start(("dicedist.train",), "checkpoint.keep=20", f"resume.step={step}")
    run.wait_for(lambda: f"continues after step {step} " in run.told()[said:])
    kill_one_of(run, draws)
    recovered = run.recovers()
    starts = [int(found) for found in re.findall(r"continues after step (\d+) ", run.told()[said:])]
    return stopped and recovered and len(starts) > 1 and max(starts) < newest


def write_to_the_store(run, draws):
    """Somebody on this machine overwrites every key of torch's store, and adds the one that ends a run."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    if ranks := run.ranks():
        about = ranks[0].environ()
        store = TCPStore(about["MASTER_ADDR"], int(about["MASTER_PORT"]), timeout=timedelta(seconds=10))
        keys = store.list_keys()
        ends = {f"{key[:end]}/ended" for key in keys for end in range(len(key)) if key[end] == "/"}
        for key in {*keys, *ends, "ended"}:
            store.set(key, draws.choice(["1", "2", "75"]))
    return run.wait() == 0 and not run.restarted()


def rename_the_folder(run, draws):
    """The run saves where its folder is, and ends with 2; it goes on when the folder has its name again."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    moved = run.run.rename(run.run.with_name("moved"))
    code, told = run.wait(), run.told()
    whole = not run.run.exists() and Folder(moved).newest_checkpoint() is not None
    moved.rename(run.run)
    return code == 2 and "was renamed to" in told and whole and run.finish()
