"""Execute a protocol: search, seeds, curves, one evaluation on the test set, and a page. Finished work is skipped.

DIRECTORY/
    protocol.yaml registration.json     the protocol, and its commit when the test set was first read
    pilot/ search/METHOD/               short runs that are timed; the searches
    seeds/ curves/                      the runs that are compared
    evidence.html table.md              the results
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.signals import Stopped
from dicedist.config import names
from dicedist.console.lines import plural, say
from dicedist.console.tables import table
from dicedist.runs.files import replace_text
from dicedist.runs.jobs import Job
from dicedist.runs.queue import Queue, last_words
from dicedist.runs.run import whole_records
from dicedist.studies.outcome import conclude
from dicedist.studies.protocol import UNREAD, Protocol, commit_of
from dicedist.studies.search import Search

PILOT_STEPS = 20


class Evidence:
    def __init__(self, protocol: Protocol, directory: Path, at_once: int):
        self.protocol, self.directory, self.at_once = protocol, directory, at_once
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / "protocol.yaml"
        if kept.exists() and kept.read_text() != protocol.text:
            raise ValueError(
                f"{directory} was begun with another version of {protocol.path}: take another --dir, or that version"
            )
        replace_text(kept, protocol.text)

    def forecast(self) -> None:
        """Print the number of runs of every method and their hours on this machine, from a short timed run of each."""
        rows, total = [], 0.0
        for method, count in self.protocol.num_runs.items():
            seconds = self.seconds_of(method)
            total += count * seconds
            rows.append([method, count, round(seconds, 1), count * seconds / 3600])
        say(table(["method", "runs", "seconds of a run", "hours"], rows))
        say(f"{total / 3600 / self.at_once:.1f} hours in all, {plural(self.at_once, 'run')} at once, less what is done")

    def seconds_of(self, method: str) -> float:
        plan = self.protocol.plan(method, self.directory)
        trial = plan.check()
        kept = self.directory / "pilot" / f"{method}.json"
        if kept.exists():
            return json.loads(kept.read_text())["seconds"]
        short = (f"max_steps={PILOT_STEPS}", "log.every_steps=10", f"run.dir={kept.parent}", f"run.name={method}")
        job = Job(method, (*trial.overrides, *short))
        kept.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with (log := kept.with_suffix(".log")).open("a") as file:
            code = job.start(1, None, file).wait()
        if code:
            raise ValueError(f"{method} does not train: {last_words(log)}")
        wall = time.monotonic() - started
        known = (record.get(names.SECONDS_PER_STEP) for record in whole_records(job.run.system_file))
        pace = ([0.0] + [value for value in known if value is not None])[-1]
        last = whole_records(job.run.records_file)[-1]
        steps = job.config.epochs * last["step"] / last["epoch"]
        seconds = wall + max(0.0, steps - last["step"]) * pace
        replace_text(kept, json.dumps({"seconds": seconds}))
        return seconds

    def train(self) -> dict[str, dict[str, str]]:
        """Run the searches, then the compared runs, all without the test set. Return the best values of each method."""
        best: dict[str, dict[str, str]] = {method: {} for method in self.protocol.methods}
        for method in self.protocol.methods if self.protocol.trials else ():
            say(f"\n== search for {method}")
            search = Search(self.protocol.plan(method, self.directory), 1, self.at_once)
            search.run()
            best[method] = conclude(search)
        say("\n== seeds and curves")
        self.finish(self.jobs(best))
        return best

    def jobs(self, best: dict[str, dict[str, str]]) -> list[Job]:
        """Return the jobs seed by seed, so that all methods progress equally."""
        protocol, folder = self.protocol, self.directory
        jobs = [protocol.job(m, best[m], seed, folder) for seed in range(protocol.seeds) for m in protocol.methods]
        for seed in range(protocol.curve_seeds):
            for method, (key, values) in protocol.curves.items():
                jobs += [protocol.job(method, best[method], seed, folder, (key, value)) for value in values]
        return jobs

    def test(self, best: dict[str, dict[str, str]]) -> list[Job]:
        """Evaluate every run once on the test set. The protocol must be committed before."""
        commit = commit_of(self.protocol.path)
        registered = self.directory / "registration.json"
        if not registered.exists():
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            replace_text(registered, json.dumps({"commit": commit, "test set first read": now}))
        measured = [
            Job(job.name, (*(o for o in job.overrides if o != UNREAD), "evaluate.test=true")) for job in self.jobs(best)
        ]
        say("\n== test")
        self.finish(measured)
        if self.protocol.shift:
            say("\n== shifted images")
            of_seeds = [job for job in measured if job.run.directory.parent.name == "seeds"]
            self.finish([self.protocol.shifted(job) for job in of_seeds])
        return measured

    def finish(self, jobs: Sequence[Job]) -> None:
        (self.directory / "logs").mkdir(exist_ok=True)
        try:
            failed = Queue(jobs, 1, self.at_once, self.directory / "logs").run()
        except Stopped:
            say("stopped; the same command continues")
            raise
        if failed:
            raise ValueError(
                f"failed: {', '.join(failed)} (logs in {self.directory / 'logs'}); the same command tries again"
            )
