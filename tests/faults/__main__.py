"""Harms tiny runs, lets them recover, and compares what they leave behind with undisturbed runs.

python -m tests.faults --rounds 100                         all of them, an hour or two on two busy cores
python -m tests.faults --jobs 2 --out rounds.jsonl          goes on where the file ends; runs are kept in rounds/
python -m tests.faults --only 17                            round 17 alone: its fault and all draws are the same
python -m tests.faults --table rounds.jsonl                 what the rounds in a file came to
python -m tests.faults --buckets --rounds 8                 runs that are kept in a bucket, and lose their disk
"""

import argparse
import collections
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from dicedist.console.tables import table
from dicedist.tracking.environment import git_commit
from tests.faults import buckets, files, processes, readers, tracking
from tests.faults.buckets import harm_kill_and_wipe
from tests.faults.files import damage_checkpoint, flip_a_bit, truncate, while_down
from tests.faults.subject import KINDS, Run, difference
from tests.faults.tracking import bad_server

EVERY = tuple(KINDS)
RANKED = tuple(kind for kind in KINDS if kind != "one process")
LAUNCHED = tuple(kind for kind in RANKED if kind != "plain torchrun")
SOME = ("one process", "nets", "plain torchrun")
SMALL = ("one process", "nets")
# name -> (fault, the kinds of runs that take turns in it, rounds of a hundred)
FAULTS = {
    "a rank killed": (processes.kill_a_rank, EVERY, 8),
    "a rank killed at start-up": (processes.kill_at_start, RANKED, 4),
    "a rank killed in evaluation": (processes.kill_in_evaluation, RANKED, 4),
    "two ranks killed, the second in recovery": (processes.kill_twice, RANKED, 5),
    "stopped, then a rank killed, then a file damaged": (files.several, EVERY, 5),
    "asked to stop": (processes.terminate, EVERY, 7),
    "asked to stop before the first step": (processes.terminate_early, SOME, 4),
    "asked to stop again and again": (processes.terminate_again, SOME, 3),
    "a rank that raises": (processes.raise_on_a_rank, RANKED, 3),
    "a rank that hangs": (processes.stop_a_rank, ("nets", "replicas", "plain torchrun"), 3),
    "a rank slowed to a crawl": (processes.slow_rank, ("nets", "okddip_dice", "plain torchrun"), 3),
    "a slow validation": (processes.slow_reading, ("nets", "branches"), 2),
    "everything suspended": (processes.suspend_everything, ("branches", "nets"), 2),
    "the launcher killed": (processes.kill_the_launcher, ("nets", "plain torchrun", "bf16"), 3),
    "the launcher's folder removed": (processes.lose_the_launchers_folder, ("nets",), 1),
    "the disk full": (files.fill_the_disk, SMALL, 3),
    "/tmp full": (files.fill_tmp, ("nets", "one process"), 2),
    "a file of a checkpoint truncated": (damage_checkpoint(truncate), ("one process", "branches", "adp"), 4),
    "a file of a checkpoint with a flipped bit": (damage_checkpoint(flip_a_bit), ("one process", "okddip_dice"), 3),
    "metrics.jsonl removed in mid-run": (files.remove_records_in_mid_run, SMALL, 2),
    "metrics.jsonl removed while down": (while_down(files.remove_records), SMALL, 2),
    "metrics.jsonl shortened while down": (while_down(files.shorten_records), SMALL, 2),
    "evaluation.json half written": (while_down(files.half_an_evaluation), SMALL, 1),
    "evaluation.json of a finished run shortened": (files.shorten_the_evaluation, SMALL, 2),
    "config.yaml damaged": (while_down(files.damage_the_config, refused="config.yaml"), SMALL, 2),
    "prepared images damaged": (while_down(files.damage_the_images, refused="damaged"), SMALL, 3),
    "evaluated while it trains": (readers.evaluate_meanwhile, SMALL, 3),
    "two evaluations at the same moment": (readers.evaluate_twice, SMALL, 2),
    "gone back to a step, then a rank killed": (readers.go_back_and_kill, ("nets", "branches"), 3),
    "the keys of torch's store overwritten": (readers.write_to_the_store, ("nets", "branches"), 2),
    "the run's folder renamed": (readers.rename_the_folder, SMALL, 2),
    "the mirror killed": (tracking.kill_the_mirror, SMALL, 3),
    "a rank killed, with MLflow": (tracking.kill_a_rank, RANKED, 3),
    "the MLflow server slow, a byte every 5 s": (bad_server("slow", heals=False), SMALL, 2),
    "the MLflow server answers 500": (bad_server("broken", heals=False), SMALL, 1),
    "the MLflow server answers 500, then recovers": (bad_server("broken", heals=True), SMALL, 1),
    "the MLflow server dies": (bad_server("gone", heals=False), SMALL, 1),
    "the MLflow server dies and comes back": (bad_server("gone", heals=True), SMALL, 1),
    "the MLflow server breaks off its answers": (bad_server("half", heals=True), SMALL, 2),
    "the disk of MLflow's database full": (tracking.fill_the_store, SMALL, 2),
    "mirror.json damaged": (tracking.damage_its_state, SMALL, 1),
}
# The same with --buckets, a plan of its own.
BUCKETS = {
    "asked to stop, the disk wiped": (buckets.stop_and_wipe, ("nets", "one process", "branches"), 1),
    "the machine lost, the disk wiped": (buckets.kill_and_wipe, ("one process", "nets", "okddip_dice"), 1),
    "the bucket answers 500, then recovers, the disk wiped": (harm_kill_and_wipe("broken", True), SMALL, 1),
    "the bucket gone, the disk wiped": (harm_kill_and_wipe("gone", False), SMALL, 1),
    "the bucket slow, a byte every 5 s, the disk wiped": (harm_kill_and_wipe("slow", False), SMALL, 1),
    "the bucket cuts what it is sent, the disk wiped": (harm_kill_and_wipe("cut", False), SMALL, 1),
    "the bucket flips bits, then recovers, the disk wiped": (harm_kill_and_wipe("flipped", True), SMALL, 1),
    "the bucket full to the end, sent later, the disk wiped": (buckets.full_to_the_end, SMALL, 1),
}


def plan(faults, rounds):
    """The fault and the kind of run of each round, always the same: the fault that is furthest behind its share."""
    counts, planned = collections.Counter(), []
    for _ in range(rounds):
        name = min(faults, key=lambda name: (counts[name] + 1) / faults[name][2])
        kinds, turn = faults[name][1], counts[name] + [*faults].index(name)
        planned.append((name, kinds[turn % len(kinds)]))
        counts[name] += 1
    return planned


class Campaign:
    """Rounds that run side by side spend their waiting times together; each is a handful of processes of its own."""

    def __init__(self, faults, seed, directory, out):
        self.faults, self.seed, self.directory, self.out, self.writing = faults, seed, directory, out, threading.Lock()
        self.making = {kind: threading.Lock() for kind in KINDS}

    def reference(self, kind):
        """An undisturbed run of this kind, made once by the code as it is."""
        with self.making[kind]:
            directory = self.directory / f"undisturbed-{kind.replace(' ', '-')}-{git_commit()}"
            if not directory.exists():
                run = Run.of(kind, directory)
                assert run.finish(), run.told()
            return directory / "tiny"

    def round(self, number, name, kind):
        self.clear(number)  # of a campaign that was broken off
        reference, run = self.reference(kind), Run.of(kind, self.directory / f"round-{number}")
        began, told = time.monotonic(), ""
        try:
            recovered = self.faults[name][0](run, random.Random(f"{self.seed}/{number}"))
        except (AssertionError, OSError, ValueError, psutil.Error, subprocess.SubprocessError) as error:
            recovered, told = False, str(error)[:1000]
        differs = difference(run.run, reference) if recovered else None
        found = {"round": number, "seed": self.seed, "fault": name, "kind": kind, "recovered": bool(recovered),
                 "equal": bool(recovered) and differs is None, "seconds": round(time.monotonic() - began),
                 "commit": git_commit(), "told": differs or told}  # fmt: skip
        if found["equal"]:
            self.clear(number)
        self.note(found)
        return found

    def clear(self, number):
        """Remove the run of a round, its log, and the files that a fault put next to them."""
        for path in [self.directory / f"round-{number}", *self.directory.glob(f"round-{number}[-.]*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def note(self, found):
        state = "recovered" if found["recovered"] else "LOST", "equal" if found["equal"] else "DIFFERENT"
        where = f"{found['round']:3d} {found['fault']}, {found['kind']}"
        with self.writing:
            print(f"{where}: {', '.join(state)}, {found['seconds']} s {found['told']}", flush=True)
            if self.out:
                with self.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def read(out):
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def show(faults, found):
    """By fault: rounds, runs that finished, runs equal to the undisturbed one, and of which kinds they were."""
    rows = []
    for name in faults:
        own = [one for one in found if one["fault"] == name]
        kinds = ", ".join(dict.fromkeys(one["kind"] for one in own))
        rows.append([name, kinds, *(sum(one[key] for one in own) for key in ("recovered", "equal"))])
        rows[-1].insert(2, len(own))
    total = [sum(row[column] for row in rows) for column in (2, 3, 4)]
    print(table(["fault", "runs", "rounds", "recovered", "equal bit for bit"], [*rows, ["all", "", *total]]))
    for commit, count in collections.Counter(one["commit"] for one in found).items():
        print(f"{count} rounds at {commit}")
    return total[0] == total[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="rounds side by side")
    parser.add_argument("--out", type=Path, help="a file that gets a line a round; rounds in it are not run again")
    parser.add_argument("--table", type=Path, help="show what is in such a file, and run nothing")
    parser.add_argument("--buckets", action="store_true", help="faults around a bucket instead")
    options = parser.parse_args()
    faults = BUCKETS if options.buckets else FAULTS
    if options.table:
        sys.exit(0 if show(faults, read(options.table)) else 1)
    directory = options.out.with_suffix("") if options.out else Path(tempfile.mkdtemp(prefix="dicedist-faults-"))
    done = {one["round"] for one in read(options.out) if one["seed"] == options.seed} if options.out else set()
    planned = plan(faults, max(options.rounds, *options.only, 0) + 1)
    chosen = [number for number in options.only or range(options.rounds) if number not in done]
    campaign = Campaign(faults, options.seed, directory, options.out)
    with ThreadPoolExecutor(options.jobs) as jobs:
        found = [*jobs.map(lambda number: campaign.round(number, *planned[number]), chosen)]
    if not show(faults, read(options.out) if options.out else found):
        sys.exit(f"what the runs left behind and said is in {directory}")


if __name__ == "__main__":
    main()
