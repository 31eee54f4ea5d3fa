"""Search by Optuna: each trial is one training, proposed from earlier trials, and pruned if others were better at the
same epoch. A search reads validation inputs only.

DIRECTORY/
    study.db                                    every trial with its values and curve; Optuna's own tools can read it
    trial-0007/ trial-0007.log trial-0007.lock  the run of a trial, its output, and the process that watches it
    best.yaml search.html                       the best config as an experiment, and the page

The same command again, or in several processes at once, continues the search. A trial without a watcher is resumed.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from dicedist.cluster.process import EXIT_STOPPED, EXIT_UNSENT
from dicedist.cluster.signals import Stopped
from dicedist.config.extras import require
from dicedist.console.lines import duration, say
from dicedist.runs.jobs import Job, Process, ended_on_stop
from dicedist.runs.queue import gpus_of, last_words
from dicedist.studies.objectives import Objective
from dicedist.studies.spaces import Choice, Interval, Space

if TYPE_CHECKING:
    import optuna

POLL = 0.5  # seconds
UNWATCHED = 4  # first trials, which are never pruned, so that later ones can be compared with them
WARM_UP = 0.25  # share of a run's epochs before it may be pruned


@dataclass(frozen=True)
class Plan:
    directory: Path
    fixed: tuple[str, ...]  # overrides of every trial
    spaces: Mapping[str, Space]
    objectives: tuple[Objective, ...]
    trials: int
    seed: int = 0  # of the proposals; the seed of the runs is an ordinary key
    prunes: bool = True
    study: str | None = None  # in trackers; None: the name of the folder

    @property
    def compares_epochs(self) -> bool:
        """True if trials may end early: runs of different lengths are at different learning rates in the same epoch."""
        return self.prunes and len(self.objectives) == 1 and "epochs" not in self.spaces

    def job(self, number: int, values: Mapping[str, Any]) -> Job:
        name = f"trial-{number:04d}"
        chosen = (f"{key}={value}" for key, value in values.items())
        place = (f"run.dir={self.directory}", f"run.name={name}", f"tracking.study={self.study or self.directory.name}")
        return Job(name, (*self.fixed, *chosen, *place, "evaluate.test=false"))

    def figures(self, values: Sequence[float]) -> str:
        return ", ".join(f"{o.title} {o.shown(value)}" for o, value in zip(self.objectives, values, strict=True))

    def check(self) -> Job:
        """Return a job with the first values; ValueError if a key is misspelled or there is no validation set."""
        first = {key: s.values[0] if isinstance(s, Choice) else number(s, s.low) for key, s in self.spaces.items()}
        job = self.job(0, first)
        if job.config.data.split == "full":
            raise ValueError("a search chooses by validation inputs, and data.split=full leaves none: write holdout")
        return job


@dataclass
class Watched:
    trial: "optuna.Trial"
    job: Job
    process: Process
    lock: FileLock


class Search:
    def __init__(self, plan: Plan, ranks: int, at_once: int = 1):
        self.plan, self.ranks = plan, ranks
        self.epochs = plan.check().config.epochs
        plan.directory.mkdir(parents=True, exist_ok=True)
        self.study = open_study(plan, self.epochs)
        self.free = list(range(at_once))
        self.running: dict[int, Watched] = {}
        self.started, self.already = time.monotonic(), self.num_ended()

    def run(self) -> None:
        with ended_on_stop(lambda: [watched.process for watched in self.running.values()]):
            while True:
                while self.free and (watched := self.next_trial(self.free[0])) is not None:
                    self.running[self.free.pop(0)] = watched
                if not self.running:
                    return
                for place, watched in list(self.running.items()):
                    if self.look_after(watched):
                        del self.running[place]
                        self.free.append(place)
                        watched.lock.release()
                time.sleep(POLL)

    def next_trial(self, place: int) -> Watched | None:
        """Return a trial that lost its watcher, or a new trial; None if all have been proposed."""
        from optuna.trial import Trial, TrialState

        with FileLock(self.plan.directory / ".study.lock"):
            for found in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                lock = self.lock_of(found.number)
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=0)
                    return self.start(Trial(self.study, found._trial_id), lock, place)
            known = len(self.study.get_trials(deepcopy=False))
            if known >= self.plan.trials:
                return None
            self.study.sampler = sampler(self.plan, known)
            trial = self.study.ask({key: distribution(space) for key, space in self.plan.spaces.items()})
            lock = self.lock_of(trial.number)
            lock.acquire()
        return self.start(trial, lock, place)

    def lock_of(self, number: int) -> FileLock:
        return FileLock(self.plan.directory / f"trial-{number:04d}.lock")

    def start(self, trial: "optuna.Trial", lock: FileLock, place: int) -> Watched:
        job = self.job_of(trial)
        with self.log_of(job).open("a") as log:
            return Watched(trial, job, job.start(self.ranks, gpus_of(place, self.ranks), log), lock)

    def look_after(self, watched: Watched) -> bool:
        """Report the run's records to Optuna. Return whether the trial has ended."""
        from optuna.trial import TrialState

        code = watched.process.poll()
        self.report(watched)
        if code is None:
            if not self.should_end(watched):
                return False
            watched.process.terminate()
            watched.process.wait()
            self.study.tell(watched.trial, state=TrialState.PRUNED)
            self.announce(watched, "ended early")
        elif code == EXIT_STOPPED:
            raise Stopped
        elif code in (0, EXIT_UNSENT) and all(map(math.isfinite, values := self.values_of(watched.job))):
            self.study.tell(watched.trial, values)
            self.announce(watched, self.plan.figures(values))
        else:
            watched.trial.set_user_attr("reason", reason := last_words(self.log_of(watched.job)))
            # Optuna ignores failed trials and would propose similar ones again; pruned trials count as bad.
            several = len(self.plan.objectives) > 1
            self.study.tell(watched.trial, state=TrialState.FAIL if several else TrialState.PRUNED)
            self.announce(watched, f"failed: {reason}")
        return True

    def should_end(self, watched: Watched) -> bool:
        """Return whether others were better at the same epoch, and epochs are left to save."""
        last = self.study.get_trials(deepcopy=False)[watched.trial.number].last_step
        if not self.plan.compares_epochs or last is None or last >= watched.job.config.epochs:
            return False
        return watched.trial.should_prune()

    def report(self, watched: Watched) -> None:
        """Report the curve of the objective to Optuna, which accepts curves for a single objective only."""
        if len(self.plan.objectives) > 1:
            return
        known = self.study.get_trials(deepcopy=False)[watched.trial.number].intermediate_values
        for epoch, value in watched.job.run.validations(self.plan.objectives[0].name):
            if round(epoch) not in known:
                watched.trial.report(value, round(epoch))

    def values_of(self, job: Job) -> list[float]:
        """Return the values of the last epoch; NaN for a missing value."""
        found = [job.run.last_validation(objective.name) for objective in self.plan.objectives]
        return [math.nan if value is None else value for value in found]

    def announce(self, watched: Watched, outcome: str) -> None:
        ended, left = self.num_ended(), self.plan.trials - self.num_ended()
        seconds = (time.monotonic() - self.started) / max(1, ended - self.already) * left
        chosen = self.written(watched.trial.params).items()
        values = ", ".join(f"{key.rpartition('.')[2]} {text}" for key, text in chosen)
        say(f"[{ended}/{self.plan.trials}] {watched.job.name} ({values}): {outcome}, {duration(seconds)} left")

    def outcomes(self) -> list[str]:
        """Return the outcome of each trial, by number: complete, pruned, fail, or running."""
        trials = self.study.get_trials(deepcopy=False)
        return ["fail" if "reason" in trial.user_attrs else trial.state.name.lower() for trial in trials]

    def num_ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def log_of(self, job: Job) -> Path:
        return self.plan.directory / f"{job.name}.log"

    def best(self) -> list["optuna.trial.FrozenTrial"]:
        """Return the best trial, or for several objectives the Pareto front sorted by the first objective."""
        from optuna.trial import TrialState

        if not self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            raise ValueError(f"no trial of {self.plan.directory} is complete: the logs there say why")
        highest = self.plan.objectives[0].direction == "maximize"
        return sorted(self.study.best_trials, key=lambda trial: trial.values[0], reverse=highest)

    def job_of(self, trial: "optuna.trial.FrozenTrial | optuna.Trial") -> Job:
        return self.plan.job(trial.number, self.written(trial.params))

    def written(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {key: number(self.plan.spaces[key], value) for key, value in values.items()}


def open_study(plan: Plan, epochs: int) -> "optuna.Study":
    require("search", "search=optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # the tests cover them
    with FileLock(plan.directory / ".study.lock"):
        study = optuna.create_study(
            storage=f"sqlite:///{plan.directory / 'study.db'}",
            study_name="search",
            directions=[objective.direction for objective in plan.objectives],
            pruner=optuna.pruners.MedianPruner(UNWATCHED, n_warmup_steps=math.ceil(WARM_UP * epochs)),
            load_if_exists=True,
        )
        asked = asked_for(plan)
        before = study.user_attrs.get("asked")
        if before is not None and before != asked:
            changed = sorted(key for key in {*before, *asked} if before.get(key) != asked.get(key))
            raise ValueError(
                f"{plan.directory} holds another search ({', '.join(changed)} differ): take another --name, or the "
                "same command"
            )
        study.set_user_attr("asked", asked)
    return study


def asked_for(plan: Plan) -> dict[str, Any]:
    """Return the settings that must not change during a search. The number of trials may grow."""
    return {
        "objective": ",".join(objective.name for objective in plan.objectives),
        # Protocols have always read the whole validation set, but studies of earlier versions do not record it.
        "fixed": sorted(word for word in plan.fixed if word != "data.val_limit=null"),
        "seed": plan.seed,
        **{key: str(space) for key, space in plan.spaces.items()},
    }


def sampler(plan: Plan, known: int) -> "optuna.samplers.BaseSampler":
    """Return a sampler whose draws are keyed by the trial, so that a resumed search equals an uninterrupted one."""
    import optuna

    startup = min(10, max(3, plan.trials // 3))
    return optuna.samplers.TPESampler(seed=1000 * plan.seed + known, n_startup_trials=startup)


def distribution(space: Space) -> "optuna.distributions.BaseDistribution":
    import optuna

    if isinstance(space, Choice):
        return optuna.distributions.CategoricalDistribution(space.values)
    if space.whole:
        return optuna.distributions.IntDistribution(int(space.low), int(space.high), log=space.log)
    return optuna.distributions.FloatDistribution(space.low, space.high, log=space.log)


def number(space: Space, value: Any) -> str:
    """Return the number as text for an override, with four digits, so that a best config is readable and repeatable."""
    return f"{value:.4g}" if isinstance(space, Interval) and not space.whole else str(value)
