"""A campaign of faults: every round harms a tiny run once, lets it recover, and compares what it leaves behind with an
undisturbed run.

python -m tests.faults --rounds 100      about 30 minutes on two busy cores
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from dicedist.console.tables import table
from dicedist.runs import checkpoint
from dicedist.runs.run import Run as Folder
from tests.support import CHECKOUT
from tests.support.tiny import assert_same_run, records_of

RANKS, STEPS, PATIENCE = 3, 60, 240  # PATIENCE in seconds
SETTINGS = [
    "data=shapes", "data.train_limit=96", "batch_size=16", "network=resnet8", "ensemble.size=2", "epochs=10",
    "log.every_steps=4", "checkpoint.every_steps=5", "evaluate.every_epochs=5", "run.name=tiny",
    "distributed.timeout=10", "tracking=none",
]  # fmt: skip
STOPPED, UNSENT = 75, 76


class Run:
    """A run that its launcher starts as often as necessary."""

    def __init__(self, directory, num_ranks=RANKS, *settings, launcher="dicedist.launch"):
        self.directory, self.num_ranks, self.settings = directory, num_ranks, settings
        self.run = directory / "tiny"
        self.log = directory.with_suffix(".log")
        self.starts_with = (
            [launcher] if launcher == "dicedist.launch" else [launcher, "--standalone", "--max-restarts=3"]
        )
        self.launcher = None

    def start(self, module=("dicedist.train",), *more, **variables):
        launch = [*self.starts_with, f"--nproc_per_node={self.num_ranks}", "-m"] if self.num_ranks > 1 else []
        settings = [*SETTINGS, f"run.dir={self.directory}", *self.settings, *more]
        command = [sys.executable, "-m", *launch, *module, *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DICEDIST_DATA": str(self.directory / "home"), **variables}
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
        if self.num_ranks == 1:
            return {0: psutil.Process(self.launcher.pid)}
        children = psutil.Process(self.launcher.pid).children()
        return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}

    def finish(self):
        """Starts the run again until it is done; False if it does not finish in three attempts."""
        for _ in range(3):
            self.start()
            if self.wait() == 0:
                return True
        return False

    def told(self):
        return self.log.read_text()


def kill_a_rank(run, draws):
    """SIGKILL: the launcher starts the ranks again."""
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    with contextlib.suppress(psutil.NoSuchProcess):
        run.ranks()[draws.randrange(run.num_ranks)].kill()
    return run.wait() == 0


def stop_a_rank(run, draws):
    """SIGSTOP, a rank that hangs: the others end after distributed.timeout, and the launcher starts them again."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    with contextlib.suppress(psutil.NoSuchProcess):
        run.ranks()[draws.randrange(run.num_ranks)].suspend()
    return run.wait() == 0


def raise_on_a_rank(run, draws):
    run.start(("tests.support.faulty", "raise", str(draws.randrange(run.num_ranks)), str(draws.randrange(1, STEPS))))
    return run.wait() == 0


def terminate(run, draws):
    """A scheduler's SIGTERM, Ctrl-C, or Slurm's SIGUSR1."""
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    run.launcher.send_signal(draws.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
    return run.wait() in (0, STOPPED) and run.finish()


def kill_the_launcher(run, draws):
    """Its ranks save and end by themselves."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    orphans = run.ranks().values()
    run.launcher.kill()
    run.launcher.wait()
    _, alive = psutil.wait_procs(orphans, 60)
    return not alive and run.finish()


def damage(how):
    """Damages one file of the newest checkpoint while the run is down, in each round another file."""
    turns = itertools.count()

    def harm(run, draws):
        run.start()
        run.wait_for_records(draws.randint(4, 10))
        run.launcher.send_signal(signal.SIGTERM)
        run.wait()
        files = sorted(checkpoint.saved(Folder(run.run).checkpoints)[-1].iterdir())
        how(files[next(turns) % len(files)], draws)
        return run.finish()

    return harm


def truncate(file, draws):
    os.truncate(file, draws.randrange(file.stat().st_size))


def flip_a_bit(file, draws):
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    file.write_bytes(content)


def fill_the_disk(run, draws):
    """A small file system that is full for a while; only root can mount one."""
    if os.geteuid():
        return limit_files(run, draws)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", run.directory], check=True)
    try:
        run.start()
        run.wait_for_records(draws.randint(1, 5))
        filler = run.directory / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        run.wait_for(lambda: "could not be written" in run.told())
        filler.unlink()
        recovered = run.wait() == 0
        run.run = shutil.copytree(run.run, made(run.directory.with_name(f"{run.directory.name}-kept")) / "tiny")
    finally:
        subprocess.run(["umount", "-l", run.directory], check=True)
    return recovered


def limit_files(run, draws):
    """For a while the process may only write small files."""
    run.start()
    run.wait_for_records(draws.randint(1, 5))
    process = psutil.Process(run.launcher.pid)
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1000, hard))
    run.wait_for(lambda: "could not be written" in run.told())
    process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
    return run.wait() == 0


def kill_at_start(run, draws):
    """Before the ranks have become a group, or just after."""
    run.start()
    run.wait_for(lambda: len(run.ranks()) == run.num_ranks)
    time.sleep(draws.uniform(0, 6))
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        run.ranks()[draws.randrange(run.num_ranks)].kill()
    return run.wait() == 0 or run.finish()


def kill_in_evaluation(run, draws):
    """After the last step, while results are computed and written."""
    run.start()
    run.wait_for(lambda: checkpoint.path_of(Folder(run.run).checkpoints, STEPS).exists())
    time.sleep(draws.uniform(0, 1))
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        run.ranks()[0].kill()
    return run.wait() == 0 or run.finish()


def kill_twice(run, draws):
    """A rank, and another while the run recovers."""
    run.start()
    for records in (draws.randint(1, 4), draws.randint(6, 10)):
        run.wait_for_records(records)
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            run.ranks()[draws.randrange(run.num_ranks)].kill()
        time.sleep(draws.uniform(0, 3))
    return run.wait() == 0 or run.finish()


def suspend_everything(run, draws):
    """For longer than the timeout, as when a laptop's lid is closed: nothing is restarted."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    everyone = [psutil.Process(run.launcher.pid), *psutil.Process(run.launcher.pid).children(recursive=True)]
    for act in ("suspend", "resume"):
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, act)()
        time.sleep(15 if act == "suspend" else 0)
    return run.wait() == 0 and "no sign of life" not in run.told() and "continues after" not in run.told()


def slow_reading(run, draws):
    """Validation takes longer than the timeout, in many small pieces: that is no hang."""
    run.start(("tests.support.faulty", "slow", "0", "0"))
    return run.wait() == 0 and "no work" not in run.told()


def lose_the_launchers_folder(run, draws):
    """Whatever cleans temporary folders removes it in mid-run."""
    folder = made(run.directory / "tmp")
    run.start(("dicedist.train",), TMPDIR=str(folder))
    run.wait_for_records(draws.randint(1, 8))
    for path in folder.glob("dicedist-*"):
        shutil.rmtree(path)
    return run.wait() == 0 and "continues after" not in run.told()


def harm_while_down(harm, *, refused=None):
    """A file beside the checkpoints, while the run is down. refused: the run says this, and goes on after a remedy."""

    def fault(run, draws):
        run.start()
        run.wait_for_records(draws.randint(4, 10))
        run.launcher.send_signal(signal.SIGTERM)
        run.wait()
        remedy = harm(run, draws)
        if refused:
            run.start()
            if run.wait() == 0 or refused not in run.told() or "Traceback" in run.told():
                return False
            remedy()
        return run.finish()

    return fault


def remove_records(run, draws):
    (run.run / "metrics.jsonl").unlink()


def shorten_records(run, draws):
    truncate(run.run / "metrics.jsonl", draws)


def half_an_evaluation(run, draws):
    (run.run / "evaluation.json").write_text('{"step": 60, "ensem')


def damage_the_config(run, draws):
    path = run.run / "config.yaml"
    whole = path.read_text()
    truncate(path, draws)
    path.write_text(path.read_text() + "\n[")
    return lambda: path.write_text(whole)


def damage_the_images(run, draws):
    (file,) = (run.directory / "home" / "prepared").rglob("train_images.npy")
    content = bytearray(file.read_bytes())
    content[draws.randrange(1000, len(content))] ^= 255
    file.write_bytes(content)
    return lambda: shutil.rmtree(run.directory / "home" / "prepared")


def mlflow_of(run):
    return f"sqlite:///{run.directory}/mlflow.db"


def kill_the_mirror(run, draws):
    """The run says that not all arrived, and the command that it names sends the rest."""
    tracked = ("tracking=mlflow", f"tracking.uri={mlflow_of(run)}", "tracking.model=null")
    run.start(("dicedist.train",), *tracked)
    run.wait_for_records(draws.randint(1, 8))
    mirrors = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "dicedist.mirror" in (process.info["cmdline"] or []) and str(run.run) in process.info["cmdline"]
    ]
    for process in mirrors:
        process.kill()
    unsent = run.wait() == UNSENT and "MLflow has not received all of it" in run.told()
    return unsent and sent_by_hand(run, mlflow_of(run)) and received_all(run)


def sent_by_hand(run, uri):
    words = [sys.executable, "-m", "dicedist.mirror", str(run.run), f"tracking.uri={uri}"]
    return subprocess.run(words, cwd=CHECKOUT, check=False, capture_output=True).returncode == 0


def received_all(run):
    """MLflow's history is metrics.jsonl, and the run is FINISHED."""
    from mlflow import MlflowClient

    client, run_id = MlflowClient(mlflow_of(run)), json.loads((run.run / "mirror.json").read_text())["run_id"]
    written = [record for record in records_of(run.run) if "train/members/loss" in record]
    history = client.get_metric_history(run_id, "train/members/loss")
    return client.get_run(run_id).info.status == "FINISHED" and sorted((m.step, m.value) for m in history) == [
        (record["step"], record["train/members/loss"]) for record in written
    ]


def kill_with_mlflow(run, draws):
    """A rank killed while MLflow listens: one run in MLflow, with every record once."""
    run.settings = ("tracking=mlflow", f"tracking.uri={mlflow_of(run)}", "tracking.model=null")
    return kill_a_rank(run, draws) and received_all(run)


# Settings of runs: ranks, launcher, and what they are told.
KINDS = {
    "nets": (RANKS, "dicedist.launch", ()),
    "one process": (1, "dicedist.launch", ()),
    "plain torchrun": (RANKS, "torch.distributed.run", ()),
    "branches": (RANKS, "dicedist.launch", ("structure=branch",)),
    "replicas": (5, "dicedist.launch", ("ensemble.replicas=2",)),
    "okddip_dice": (RANKS, "dicedist.launch", ("method=okddip_dice", "ensemble.size=3")),
    "bf16": (RANKS, "dicedist.launch", ("precision=bf16",)),
}
EVERY = tuple(KINDS)
LAUNCHED = tuple(kind for kind in KINDS if kind not in ("one process", "plain torchrun"))
# name -> (fault, the settings that take turns in it, weight): faults take turns, some more often than others.
FAULTS = {
    "a rank killed": (kill_a_rank, [kind for kind in EVERY if kind != "one process"], 4),
    "a rank killed at start-up": (kill_at_start, LAUNCHED, 2),
    "a rank killed in evaluation": (kill_in_evaluation, LAUNCHED, 2),
    "two ranks killed, the second in recovery": (kill_twice, LAUNCHED, 2),
    "asked to stop": (terminate, LAUNCHED, 4),
    "a file of a checkpoint truncated": (damage(truncate), ["one process", "branches"], 3),
    "a file of a checkpoint with a flipped bit": (damage(flip_a_bit), ["one process", "okddip_dice"], 3),
    "a rank that raises": (raise_on_a_rank, LAUNCHED, 2),
    "the disk full": (fill_the_disk, ["one process"], 2),
    "a rank that hangs": (stop_a_rank, ["nets", "replicas"], 2),
    "everything suspended": (suspend_everything, ["nets", "branches"], 2),
    "slow but healthy": (slow_reading, ["nets"], 1),
    "the launcher killed": (kill_the_launcher, ["nets"], 1),
    "the launcher's folder removed": (lose_the_launchers_folder, ["nets"], 1),
    "metrics.jsonl removed": (harm_while_down(remove_records), ["nets", "one process"], 1),
    "metrics.jsonl shortened": (harm_while_down(shorten_records), ["nets", "one process"], 1),
    "evaluation.json half written": (harm_while_down(half_an_evaluation), ["one process"], 1),
    "config.yaml damaged": (harm_while_down(damage_the_config, refused="config.yaml"), ["one process"], 1),
    "prepared images damaged": (harm_while_down(damage_the_images, refused="images are damaged"), ["one process"], 1),
    "the mirror killed": (kill_the_mirror, ["one process", "nets"], 2),
    "a rank killed, with MLflow": (kill_with_mlflow, ["nets"], 2),
}


def campaign(rounds, seed, directory):
    """By fault: rounds, runs that finished, runs equal bit for bit to an undisturbed one."""
    draws = random.Random(seed)
    references = {}
    counts = {name: collections.Counter() for name in FAULTS}
    for number in range(rounds):
        name = next_fault(counts)
        harm, kinds, _ = FAULTS[name]
        kind = kinds[counts[name]["rounds"] % len(kinds)]
        if kind not in references:
            references[kind] = made_run(directory / f"undisturbed-{kind.replace(' ', '-')}", kind)
            assert references[kind].finish(), references[kind].told()
        run = made_run(directory / f"round-{number}", kind)
        began = time.monotonic()
        try:
            recovered = harm(run, draws)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(error)
            recovered = False
        equal = recovered and same(run.run, references[kind].run)
        counts[name].update(rounds=1, recovered=int(recovered), equal=int(equal))
        print(f"{number + 1:3d} {name}, {kind}: {'recovered' if recovered else 'LOST'}, "
              f"{'equal' if equal else 'DIFFERENT'}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        if equal:
            shutil.rmtree(run.run)
    return counts


def made_run(directory, kind):
    num_ranks, launcher, settings = KINDS[kind]
    return Run(made(directory), num_ranks, *settings, launcher=launcher)


def next_fault(counts):
    """The fault that is furthest behind its share."""
    return min(FAULTS, key=lambda name: (counts[name]["rounds"] + 1) / FAULTS[name][2])


def made(directory):
    directory.mkdir(parents=True)
    return directory


def same(run, reference):
    try:
        assert_same_run(run, reference, STEPS)
        results = [json.loads((folder / "evaluation.json").read_text()) for folder in (run, reference)]
        assert results[0] == results[1], "evaluation.json differs"
        logits = [load_file(folder / "logits.safetensors") for folder in (run, reference)]
        assert all(torch.equal(logits[0][name], logits[1][name]) for name in logits[1]), "logits differ"
    except (AssertionError, OSError) as error:
        print(error)
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="dicedist-faults-"))
    counts = campaign(options.rounds, options.seed, directory)
    rows = [[name, count["rounds"], count["recovered"], count["equal"]] for name, count in counts.items()]
    total = [sum(row[column] for row in rows) for column in (1, 2, 3)]
    print(table(["fault", "rounds", "recovered", "equal bit for bit"], [*rows, ["all", *total]]))
    if total[0] == total[2]:
        shutil.rmtree(directory)
    else:
        sys.exit(f"what the runs left behind and said is in {directory}")


if __name__ == "__main__":
    main()
