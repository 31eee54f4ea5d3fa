"""Training from Python: processes are started, shown and stopped as in a terminal, and the run is there to be read."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import dicedist
from dicedist.config import compose_config
from dicedist.runs.run import Run as Folder
from tests.support.tiny import TINY, records_of

QUICK = [*TINY, "network._target_=tests.support.networks.Small", "network.trusted=true"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return dicedist.fit(*QUICK, "max_steps=6", f"run.dir={folder}", nproc=2)


def test_a_run_over_two_ranks(run, capfd):
    assert isinstance(run, dicedist.Run) and repr(run) == f"Run({str(run.directory)!r})"
    assert run.records() == records_of(run.directory) and run.records()[-1]["step"] == 6
    assert run.results["step"] == 6 and 0 <= run.results["ensemble"]["accuracy"] <= 1
    assert run.newest_checkpoint().step == 6
    assert "accuracy" in run._repr_html_()


def test_its_page_figures_and_ensemble(run, tmp_path):
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    figures = run.figures()
    assert figures and all(figure.svg.startswith("<svg") for figure in figures.values())
    assert figures["redundancy"]._repr_html_().startswith('<img src="data:image/svg+xml;base64,')
    answers = run.ensemble(trusted=True).predict(np.zeros((2, 32, 32, 3)) + 0.5)
    assert len(answers) == 2 and answers.member_logits.shape == (2, 2, 10)


@pytest.fixture
def hears_ctrl_c():
    """Handle SIGINT as in a terminal: a background job of a shell starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_saves(tmp_path, capfd):
    call = [*QUICK, "epochs=4000", "log.every_steps=1", f"run.dir={tmp_path}"]
    folder = Folder(tmp_path / "tiny")

    def press_when_it_runs():
        while not folder.records_file.exists() or not folder.records_file.read_text():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_when_it_runs, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        dicedist.fit(*call)
    stopped = folder.newest_checkpoint()
    assert stopped is not None and folder.stopped_file.exists()
    assert "the same command continues" in capfd.readouterr().out
    with pytest.raises(ValueError, match="is not evaluated yet: finish its training, or run dicedist evaluate"):
        dicedist.Run.open(folder.directory).results  # noqa: B018


@pytest.mark.parametrize(
    ("overrides", "settings", "line"),
    [
        (["memebers=3"], {}, "memebers: there is no such key"),
        (["epochs=many"], {}, "epochs"),
        ([], {"nproc": "many"}, "--nproc .*many: write a number above 0, or auto"),
    ],
)
def test_refusals_are_value_errors(overrides, settings, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        dicedist.fit(*QUICK, f"run.dir={tmp_path}", *overrides, **settings)


def test_ranks_cannot_start_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="fit starts the ranks itself"):
        dicedist.fit()


def test_no_process_to_start(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ValueError, match="no process can be started: run dicedist train"):
        dicedist.fit(*QUICK, f"run.dir={tmp_path}")


def test_a_run_that_has_only_begun(tmp_path):
    begun = dicedist.Run(tmp_path / "begun")
    begun.directory.mkdir()
    begun.save_config(compose_config(QUICK[:7]))
    assert begun.records() == [] and begun.report().exists()
    for use, line in (
        (lambda: begun.results, "begun is not evaluated yet: finish its training"),
        (begun.ensemble, "begun has no intact checkpoint"),
        (lambda: dicedist.Ensemble.load(begun.directory), "begun has no intact checkpoint"),
    ):
        with pytest.raises(ValueError, match=line):
            use()


def test_score_of_anyones_ensemble():
    draws = np.random.default_rng(0)
    logits, labels = draws.normal(size=(3, 50, 4)), draws.integers(4, size=50)
    found = dicedist.score(logits, labels, average="probabilities")
    p = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    assert found["ensemble"]["accuracy"] == (p.mean(0).argmax(1) == labels).mean()
    assert found["ensemble"]["nll"] == pytest.approx(-np.log(p.mean(0)[range(50), labels]).mean(), rel=1e-6)
    assert len(found["pairs"]) == 3
    for wrong, line in (
        ((logits[0], labels), "logits must be"),
        ((logits, labels[:9]), "labels must have shape"),
        ((logits, labels + 0.5), "labels are torch.float64: give whole numbers from 0"),
        ((logits, labels + 1), "labels must be 0 to 3: got 1 to 4"),
        ((logits * np.nan, labels), "member 0 gave NaN or infinite logits"),
        (("logits", labels), r"logits \[M, N, K\] and labels \[N\] must be numbers"),
        ((logits, labels, "votes"), "average=votes: write logits or probabilities"),
    ):
        with pytest.raises(ValueError, match=line):
            dicedist.score(*wrong)
