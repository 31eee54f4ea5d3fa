"""The run that a round harms: started by its launcher as often as necessary, and compared with an undisturbed one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from tests.support import CHECKOUT
from tests.support.tiny import assert_same_run

RANKS, STEPS = 3, 60
# Seconds. Both leave room for a machine that is busy with other work: being slow is no fault.
PATIENCE, TIMEOUT = 900, 20
SETTINGS = [
    "data=shapes", "data.train_limit=96", "batch_size=16", "network=resnet8", "ensemble.size=2", "epochs=10",
    "log.every_steps=4", "checkpoint.every_steps=5", "evaluate.every_epochs=5", "run.name=tiny",
    f"distributed.timeout={TIMEOUT}", "tracking=none",
]  # fmt: skip
STOPPED, UNSENT = 75, 76
LAUNCH, TORCHRUN = "dicedist.launch", "torch.distributed.run"
# name -> ranks, launcher, overrides.
KINDS = {
    "nets": (RANKS, LAUNCH, ()),
    "one process": (1, None, ()),
    "plain torchrun": (RANKS, TORCHRUN, ()),
    "branches": (RANKS, LAUNCH, ("structure=branch",)),
    "replicas": (5, LAUNCH, ("ensemble.replicas=2",)),
    "okddip_dice": (RANKS, LAUNCH, ("method=okddip_dice", "ensemble.size=3")),
    "adp": (2, LAUNCH, ("method=adp",)),
    "bf16": (RANKS, LAUNCH, ("precision=bf16",)),
}


class Run:
    def __init__(self, directory, num_ranks=RANKS, *settings, launcher=LAUNCH):
        self.directory, self.num_ranks, self.settings, self.launcher_name = directory, num_ranks, settings, launcher
        self.run = directory / "tiny"
        self.log = directory.with_suffix(".log")
        self.variables = {}  # of the environment
        self.launcher = None

    @classmethod
    def of(cls, kind, directory):
        directory.mkdir(parents=True)
        num_ranks, launcher, settings = KINDS[kind]
        return cls(directory, num_ranks, *settings, launcher=launcher)

    def start(self, module=("dicedist.train",), *more, **variables):
        options = ["--standalone", "--max-restarts=3"] if self.launcher_name == TORCHRUN else []
        launch = [self.launcher_name, *options, f"--nproc_per_node={self.num_ranks}", "-m"]
        settings = [*SETTINGS, f"run.dir={self.directory}", *self.settings, *more]
        command = [sys.executable, "-m", *(launch if self.num_ranks > 1 else []), *module, *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DICEDIST_DATA": str(self.directory / "home")}
        environment |= self.variables | variables
        with self.log.open("a") as log:
            self.launcher = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)

    def wait(self):
        return self.launcher.wait(PATIENCE)

    def wait_for(self, condition):
        """Waits until the condition holds or the run has ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition() and self.launcher.poll() is None:
            assert time.monotonic() < deadline, f"nothing happened for {PATIENCE} s: {self.told()[-500:]}"
            time.sleep(0.02)

    def wait_for_records(self, lines):
        path = self.run / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines)

    def ranks(self):
        """The processes of this run, by rank."""
        if self.launcher.poll() is not None:
            return {}
        if self.num_ranks == 1:
            return {0: psutil.Process(self.launcher.pid)}
        found = {}
        for child in psutil.Process(self.launcher.pid).children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):  # it has just ended, or is not yet a rank
                continue
        return found

    def everyone(self):
        """The launcher and all processes under it, the mirror too."""
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def stop(self, number):
        """Asks the run to stop; whether it did, or was done already. Plain torchrun has codes of its own, and breaks
        off at a second signal: its ranks then end by themselves."""
        ranks = [*self.ranks().values()]
        with contextlib.suppress(ProcessLookupError):
            self.launcher.send_signal(number)
        code = self.wait()
        _, alive = psutil.wait_procs(ranks, PATIENCE)
        return not alive and (code in (0, STOPPED) or self.launcher_name == TORCHRUN)

    def recovers(self):
        """Return whether the launcher finishes the run. A single process has no launcher, and is started again."""
        return self.wait() == 0 or (self.num_ranks == 1 and self.finish())

    def finish(self):
        """Starts the run again until it is done; False if it does not finish in three attempts."""
        for _ in range(3):
            self.start()
            if self.wait() == 0:
                return True
        return False

    def told(self):
        return self.log.read_text() if self.log.exists() else ""

    def restarted(self):
        return "continues after" in self.told()


def listens(pid):
    """Return whether the process has a handler for SIGTERM. While Python starts, no program can have one."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def difference(run, reference):
    """Return the first difference of two finished runs: tensors, records, evaluation.json, logits; None if equal."""
    try:
        assert_same_run(run, reference, STEPS)
        results = [json.loads((folder / "evaluation.json").read_text()) for folder in (run, reference)]
        assert results[0] == results[1], "evaluation.json differs"
        logits = [load_file(folder / "logits.safetensors") for folder in (run, reference)]
        assert logits[0].keys() == logits[1].keys(), "logits differ"
        assert all(torch.equal(logits[0][name], logits[1][name]) for name in logits[1]), "logits differ"
    except (AssertionError, OSError) as error:
        return str(error)[:500] or "different"
    return None
