"""A search with trainings that only pretend: what is proposed, ended early, continued, counted and written."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from dicedist import sweep
from dicedist.config import compose, compose_config
from dicedist.reporting.search import Attempt, search_page
from dicedist.runs.jobs import Job
from dicedist.studies import search as searching
from dicedist.studies.objectives import objectives_of
from dicedist.studies.outcome import conclude
from dicedist.studies.search import Plan, Search
from dicedist.studies.spaces import Choice, Interval, space_of
from tests.support.markup import EVERYTHING, HOSTILE, assert_only_our_markup

optuna = pytest.importorskip("optuna")
FIXED = ("data=shapes", "network=resnet8", "method=ind", "ensemble.size=2", "epochs=8", "tracking=none")
SPACES = {"optimizer.lr": Interval(0.001, 1.0, True, False), "optimizer.momentum": Choice(("0.5", "0.9"))}


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("interval(0.02,0.6,log)", Interval(0.02, 0.6, True, False)),
        ("interval(-1, 2)", Interval(-1.0, 2.0, False, True)),
        ("interval(0,1.5)", Interval(0.0, 1.5, False, False)),
        ("choice(0.1,auto)", Choice(("0.1", "auto"))),
        ("choice([[0,100],[300,8]],[[0,2]])", Choice(("[[0,100],[300,8]]", "[[0,2]]"))),
        ("0.1,0.2", None),
    ],
)
def test_spaces(text, space):
    assert space_of("key", text) == space


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("interval(1)", "write interval(low,high)"),
        ("interval(2,1)", "low below high"),
        ("interval(a,b)", "write interval(low,high)"),
        ("interval(0,1,log)", "begins above 0"),
        ("interval(0,1,exp)", "write interval(low,high)"),
        ("choice(1)", "at least two values"),
    ],
)
def test_spaces_that_cannot_be(text, line):
    with pytest.raises(ValueError, match="key=") as error:
        space_of("key", text)
    assert line in str(error.value)


def test_objectives_have_the_direction_of_their_measure():
    accuracy, ratio = objectives_of("accuracy,ratio_error")
    assert (accuracy.name, accuracy.title, accuracy.direction) == (
        "ensemble/accuracy",
        "ensemble accuracy, %",
        "maximize",
    )
    assert (ratio.name, ratio.title, ratio.direction) == ("diversity/ratio_error", "ratio-error", "maximize")
    assert objectives_of("members/nll")[0].direction == "minimize"
    with pytest.raises(ValueError, match=r"acuracy: no such measure of validation \(did you mean accuracy\?\)"):
        objectives_of("acuracy")
    with pytest.raises(ValueError, match="name every measure once"):
        objectives_of("nll,ensemble/nll")


class Pretended:
    """A training whose NLL falls towards a value that depends on its rate, an epoch at each look."""

    started: list[str]
    per_look = 99  # epochs
    lingers = 0  # looks after the last epoch before it ends

    def __init__(self, job):
        self.job, self.epoch, self.ended, self.left = job, 0, None, self.lingers
        Pretended.started.append(job.name)

    def poll(self):
        if self.job.config.optimizer.momentum == 0.5 and self.job.config.optimizer.lr > 0.5:
            return 2
        self.job.run.directory.mkdir(parents=True, exist_ok=True)
        distance = abs(math.log10(self.job.config.optimizer.lr) + 1)  # best at 0.1
        with self.job.run.records_file.open("a") as file:
            for _ in range(min(self.per_look, 8 - self.epoch)):
                self.epoch += 1
                values = {"val/ensemble/nll": distance + 1 / self.epoch, "val/ensemble/accuracy": 1 - distance / 9}
                print(json.dumps({"step": self.epoch, "epoch": float(self.epoch), **values}), file=file)
        if self.epoch == 8 and self.left:
            self.left -= 1
            return self.ended
        return 0 if self.epoch == 8 else self.ended

    def terminate(self):
        self.ended = 75

    def wait(self):
        return self.ended


@pytest.fixture
def pretending(monkeypatch):
    Pretended.started = []
    monkeypatch.setattr(searching, "POLL", 0)
    monkeypatch.setattr(Job, "start", lambda job, ranks, gpus, log: Pretended(job))


def plan_in(folder, trials=8, objective="nll", **others):
    return Plan(folder, FIXED, SPACES, objectives_of(objective), trials, **others)


def trials_of(search):
    return [(trial.params, trial.values) for trial in search.study.get_trials()]


@pytest.mark.usefixtures("pretending")
def test_it_finds_the_best_counts_every_trial_and_writes_what_it_found(tmp_path, capsys, monkeypatch):
    search = Search(plan_in(tmp_path / "found"), ranks=1)
    search.run()
    trials = search.study.get_trials()
    assert len(trials) == 8 == len(set(Pretended.started))
    complete = [trial for trial in trials if trial.values]
    best = conclude(search)
    assert float(best["optimizer.lr"]) == pytest.approx(
        min(complete, key=lambda trial: trial.values[0]).params["optimizer.lr"], rel=1e-3
    )
    told = capsys.readouterr().out
    assert "8 trials: " in told and "test %" not in told
    page = (tmp_path / "found" / "search.html").read_text()
    assert all(f"<h2>{title}</h2>" in page for title in ("History", "Which keys mattered", "Slices", "Trials"))

    conf = tmp_path / "conf"
    shutil.copytree(compose.CONF, conf)
    shutil.copy(tmp_path / "found" / "best.yaml", conf / "experiment" / "found.yaml")
    monkeypatch.setattr(compose, "CONF", conf)
    config = compose_config(["experiment=found"])
    assert (config.data.name, config.network.name, config.method.name, config.epochs) == ("shapes", "resnet8", "ind", 8)
    assert f"{config.optimizer.lr}" == best["optimizer.lr"]


@pytest.mark.usefixtures("pretending")
def test_a_trial_that_is_worse_at_the_same_epoch_is_ended_early(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pretended, "per_look", 1)
    search = Search(plan_in(tmp_path, trials=12), ranks=1)
    search.run()
    ended = search.outcomes()
    pruned = [trial for trial in search.study.get_trials() if ended[trial.number] == "pruned"]
    assert pruned and all(2 <= max(trial.intermediate_values) < 8 for trial in pruned)
    assert all(trial.number >= 4 for trial in pruned), "the first ones are what others are compared with"
    conclude(search)
    rows = [
        line for line in capsys.readouterr().out.partition("\ntrial ")[2].splitlines() if line[:5].strip().isdigit()
    ]
    assert sorted(int(row.split()[0]) for row in rows) == [n for n, one in enumerate(ended) if one == "complete"]


@pytest.mark.usefixtures("pretending")
def test_a_trial_that_has_reached_its_last_epoch_keeps_its_value(tmp_path, monkeypatch):
    monkeypatch.setattr(Pretended, "lingers", 1)
    search = Search(plan_in(tmp_path, trials=12), ranks=1)
    search.run()
    assert set(search.outcomes()) <= {"complete", "fail"}


def test_trials_of_different_lengths_are_not_compared_at_the_same_epoch(tmp_path):
    plan = plan_in(tmp_path)
    assert plan.compares_epochs
    assert not replace(plan, spaces={**SPACES, "epochs": Choice(("4", "8"))}).compares_epochs


@pytest.mark.usefixtures("pretending")
def test_nothing_is_ended_early_if_nobody_wants_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Pretended, "per_look", 4)
    search = Search(plan_in(tmp_path, prunes=False), ranks=1)
    search.run()
    assert set(search.outcomes()) <= {"complete", "fail"}
    assert 1 <= search.outcomes().count("fail") < 4, "where trials failed, fewer are proposed"


@pytest.mark.usefixtures("pretending")
def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    whole = Search(plan_in(tmp_path / "whole", trials=5), ranks=1)
    whole.run()
    killed = Search(plan_in(tmp_path / "killed", trials=5), ranks=1)
    for _ in range(2):
        watched = killed.next_trial(0)
        while not killed.look_after(watched):
            pass
        watched.lock.release()
    abandoned = killed.next_trial(0)
    abandoned.lock.release()  # as the kernel does when a process dies
    again = Search(plan_in(tmp_path / "killed", trials=5), ranks=1)
    again.run()
    assert trials_of(again) == trials_of(whole)
    assert Pretended.started.count(abandoned.job.name) == 3  # by the whole search, the killed one, and its successor


@pytest.mark.usefixtures("pretending")
def test_two_workers_share_the_trials(tmp_path):
    first, second = (Search(plan_in(tmp_path, trials=3), ranks=1, at_once=2) for _ in range(2))
    mine, yours = first.next_trial(0), second.next_trial(0)
    assert (mine.trial.number, yours.trial.number) == (0, 1), "nobody takes a trial that is watched"
    first.run()
    assert [trial.state.is_finished() for trial in first.study.get_trials()] == [False, False, True]
    mine.lock.release(), yours.lock.release()
    second.run()
    assert second.num_ended() == 3


@pytest.mark.usefixtures("pretending")
def test_several_objectives_have_a_front(tmp_path, capsys):
    search = Search(plan_in(tmp_path, trials=6, objective="nll,accuracy"), ranks=1)
    search.run()
    conclude(search)
    assert "ensemble accuracy, %, validation" in capsys.readouterr().out
    assert "Pareto front" in (tmp_path / "search.html").read_text()


def test_no_key_or_value_of_a_search_becomes_markup():
    aims = objectives_of("nll")
    attempts = [
        Attempt(0, "complete", dict.fromkeys(HOSTILE, EVERYTHING), {}, [0.5], [(1.0, 0.6), (2.0, 0.5)], True, ""),
        Attempt(1, "complete", dict.fromkeys(HOSTILE, "0.1"), {HOSTILE[0]: 0.1}, [0.7], [], False, ""),
        Attempt(2, "fail", dict.fromkeys(HOSTILE, EVERYTHING), {}, [], [], False, EVERYTHING),
    ]
    shown = assert_only_our_markup(search_page(aims, attempts, dict.fromkeys(HOSTILE, 0.2)))
    assert EVERYTHING in shown and all(name in shown for name in HOSTILE)


@pytest.mark.usefixtures("pretending")
def test_another_search_in_the_folder_is_refused(tmp_path):
    Search(plan_in(tmp_path), ranks=1)
    Search(plan_in(tmp_path, trials=20), ranks=1)  # it may get more trials
    with pytest.raises(ValueError, match="holds another search .objective differ"):
        Search(plan_in(tmp_path, objective="accuracy"), ranks=1)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["search=optuna", "seed=0"], "needs a key to choose"),
        (["search=grid", "optimizer.lr=interval(0.1,1)"], "search=grid: write search=optuna"),
        (["search=optuna", "optimiser.lr=interval(0.1,1)"], "did you mean optimizer"),
        (["search=optuna", "optimizer.lr=interval(0.1,1)", "data.split=full"], "leaves none: write holdout"),
        (["search=optuna", "optimizer.lr=interval(0.1,1)", "--objective", "speed"], "no such measure"),
        (["search=optuna", "optimizer.lr=interval(0.1,1)", "--trials", "0"], "--trials 0: write a number above 0"),
    ],
)
def test_mistakes_end_it_before_the_first_trial(tmp_path, arguments, line):
    with pytest.raises(ValueError) as error:
        sweep.run(["--dir", str(tmp_path), *arguments])
    assert line in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
