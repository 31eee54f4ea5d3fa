"""A campaign of faults: every round harms a tiny run once, lets it recover, and compares what it leaves behind with an
undisturbed run.

python -m tests.faults --rounds 50      about 30 minutes on two busy cores
"""

import argparse
import collections
import contextlib
import itertools
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

from dicedist.console.tables import table
from dicedist.runs import checkpoint
from dicedist.runs.run import Run as Folder
from tests.support import CHECKOUT
from tests.support.tiny import assert_same_run

RANKS, STEPS, PATIENCE = 3, 60, 240  # PATIENCE in seconds
SETTINGS = [
    "data=shapes", "data.train_limit=96", "batch_size=16", "network=resnet8", "ensemble.size=2", "epochs=10",
    "log.every_steps=4", "checkpoint.every_steps=5", "evaluate.every_epochs=5", "run.name=tiny",
    "distributed.timeout=10", "tracking=none",
]  # fmt: skip
STOPPED = 75


class Run:
    """A run that its launcher starts as often as necessary."""

    def __init__(self, directory, num_ranks=RANKS, *settings):
        self.directory, self.num_ranks, self.settings = directory, num_ranks, settings
        self.run = directory / "tiny"
        self.log = directory.with_suffix(".log")
        self.launcher = None

    def start(self, module=("dicedist.train",)):
        launch = ["dicedist.launch", f"--nproc_per_node={self.num_ranks}", "-m"] if self.num_ranks > 1 else []
        command = [sys.executable, "-m", *launch, *module, *SETTINGS, f"run.dir={self.directory}", *self.settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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
        run.ranks()[draws.randrange(RANKS)].kill()
    return run.wait() == 0


def stop_a_rank(run, draws):
    """SIGSTOP, a rank that hangs: the others end after distributed.timeout, and the launcher starts them again."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    with contextlib.suppress(psutil.NoSuchProcess):
        run.ranks()[draws.randrange(RANKS)].suspend()
    return run.wait() == 0


def raise_on_a_rank(run, draws):
    run.start(("tests.support.faulty", "raise", str(draws.randrange(RANKS)), str(draws.randrange(1, STEPS))))
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


# name -> (fault, ranks, weight): faults take turns, some more often than others.
FAULTS = {
    "a rank killed": (kill_a_rank, RANKS, 4),
    "asked to stop": (terminate, RANKS, 4),
    "a file truncated": (damage(truncate), 1, 4),
    "a file with a flipped bit": (damage(flip_a_bit), 1, 4),
    "a rank that raises": (raise_on_a_rank, RANKS, 3),
    "the disk full": (fill_the_disk, 1, 2),
    "a rank that hangs": (stop_a_rank, RANKS, 1),
    "the launcher killed": (kill_the_launcher, RANKS, 1),
}


def campaign(rounds, seed, directory):
    """By fault: rounds, runs that finished, runs equal bit for bit to an undisturbed one."""
    draws = random.Random(seed)
    references = {}
    for num_ranks in (1, RANKS):
        references[num_ranks] = Run(made(directory / f"undisturbed-{num_ranks}"), num_ranks)
        assert references[num_ranks].finish(), references[num_ranks].told()
    counts = {name: collections.Counter() for name in FAULTS}
    for number in range(rounds):
        name = next_fault(counts)
        harm, num_ranks, _ = FAULTS[name]
        run = Run(made(directory / f"round-{number}"), num_ranks)
        began = time.monotonic()
        recovered = harm(run, draws)
        equal = recovered and same(run.run, references[num_ranks].run)
        counts[name].update(rounds=1, recovered=int(recovered), equal=int(equal))
        print(f"{number + 1:3d} {name}: {'recovered' if recovered else 'LOST'}, "
              f"{'equal' if equal else 'DIFFERENT'}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        if equal:
            shutil.rmtree(run.run)
    return counts


def next_fault(counts):
    """The fault that is furthest behind its share."""
    return min(FAULTS, key=lambda name: (counts[name]["rounds"] + 1) / FAULTS[name][2])


def made(directory):
    directory.mkdir(parents=True)
    return directory


def same(run, reference):
    try:
        assert_same_run(run, reference, STEPS)
    except AssertionError as error:
        print(error)
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
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
