"""Fault tests of the acceptance: after a lost, hung or stopped rank, a run must end as an undisturbed run does.

Runs use deterministic=true, so they must be equal bit for bit (docs/resilience.md).
"""

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import psutil

from dicedist.cluster.process import EXIT_STOPPED
from dicedist.config import names
from dicedist.diagnosis.finding import FAILED, OK, Finding
from dicedist.diagnosis.trials import LIMIT, Check, Machine, Values
from dicedist.runs.run import Run

RANKS = 2
AFTER = 6  # records before the fault; checkpoints are 4 steps apart
TIMEOUT = 20  # seconds after which a rank without an answer is given up


def lost(number: signal.Signals, least_ranks: int, machine: Machine) -> Finding:
    """Send a signal to the last rank. The launcher must restart the ranks from the last checkpoint."""
    ranks = max(least_ranks, min(RANKS, machine.most_ranks))
    run, words = training(machine, number.name)
    with machine.launched(words, ranks) as launcher:
        wait_for_records(launcher, run)
        ranks_of(launcher)[ranks - 1].send_signal(number)
        code = launcher.wait(LIMIT)
    if code:
        return Finding(FAILED, f"the run ended with code {code}", "`dicedist doctor` first")
    return as_undisturbed(machine, run)


def stopped(machine: Machine) -> Finding:
    """Send SIGTERM, as schedulers do. All ranks must save and end with code 75; one process then resumes."""
    ranks = min(RANKS, machine.most_ranks)
    run, words = training(machine, "stopped")
    with machine.launched(words, ranks) as launcher:
        wait_for_records(launcher, run)
        launcher.terminate()
        code = launcher.wait(LIMIT)
    if code != EXIT_STOPPED:
        return Finding(FAILED, f"the run ended with code {code}, not {EXIT_STOPPED}")
    machine.start(words)
    found = as_undisturbed(machine, run)
    return replace(found, what=f"{ranks} ranks, then 1: {found.what}")


def faults() -> dict[str, Check]:
    return {
        "a killed rank": partial(lost, signal.SIGKILL, 1),
        "a hung rank": partial(lost, signal.SIGSTOP, 2),
        "asked to stop, resumed on another placement": stopped,
    }


def training(machine: Machine, name: str) -> tuple[Run, list[str]]:
    """Return a run that is long enough for a fault in the middle, and its command."""
    keys = [*machine.keys, "method=dice", "ensemble.size=2", "data.train_limit=64", "batch_size=16", "epochs=1000"]
    keys += [f"max_steps={400 if machine.on_gpu else 24}", "evaluate.every_epochs=1000", "evaluate.test=false"]
    keys += ["log.every_steps=1", "checkpoint.every_steps=4", f"distributed.timeout={TIMEOUT}"]
    keys += ["deterministic=true", "ensemble.batched=false", f"run.dir={machine.folder}", f"run.name={name}"]
    return Run(machine.folder / name), ["dicedist.train", *keys]


@cache
def undisturbed(machine: Machine) -> list[Values]:
    run, words = training(machine, "undisturbed")
    machine.start(words, min(RANKS, machine.most_ranks))
    return training_records(run)


def as_undisturbed(machine: Machine, run: Run) -> Finding:
    """Check that every step is recorded once, and that every value equals the undisturbed run's to the bit."""
    here, expected = training_records(run), undisturbed(machine)
    if len(here) != len(expected):
        return Finding(FAILED, f"{len(here)} records, where an undisturbed run has {len(expected)}")
    if apart := [nth for nth, (one, other) in enumerate(zip(here, expected, strict=True)) if one != other]:
        remedy = "the run resumed from another state, or deterministic=true does not fix the order of every sum"
        return Finding(FAILED, f"{len(apart)} of {len(here)} steps differ, the first is step {apart[0] + 1}", remedy)
    return Finding(OK, f"{len(here)} steps are equal bit for bit")


def training_records(run: Run) -> list[Values]:
    """Return the records of training, without those of validation."""
    lines = [json.loads(line) for line in run.records_file.read_text().splitlines()]
    named = [{name: value for name, value in line.items() if names.is_of(name, names.TRAIN)} for line in lines]
    return [values for values in named if values]


def wait_for_records(launcher: subprocess.Popen[bytes], run: Run) -> None:
    deadline = time.monotonic() + LIMIT
    while not run.records_file.exists() or run.records_file.read_bytes().count(b"\n") < AFTER:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{run} ended before it wrote {AFTER} records")
        time.sleep(0.01)


def ranks_of(launcher: subprocess.Popen[bytes]) -> Sequence[psutil.Process]:
    """Return the processes of the run, by rank."""
    ranks = [child for child in psutil.Process(launcher.pid).children() if "RANK" in child.environ()]
    return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))
