"""A researcher trains two methods, looks at parts of an ensemble, measures OOD sets, compares, and sweeps."""

import json

import numpy as np
import pytest

from tests.support.journeys import SMALL, documented

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(shell):
    """DICE over three ranks as branches, independent nets in one process."""
    np.save(shell.home / "Rauschen 1.npy", np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), np.uint8))
    line = documented("torchrun --nproc_per_node=3 -m dicedist.train ensemble.size=4 structure=branch")
    told = shell.run(f"{line} data=shapes {SMALL} tracking=none run.name=dice")
    assert "3 ranks on cpu (" in told and "discriminator)" in told
    assert "\naccuracy: ensemble " in told and "done: runs/dice/report.html" in told.splitlines()
    assert "\ntempered " not in told and "\ntempered " in shell.run("dicedist show runs/dice")
    line = documented("python -m dicedist.train data=shapes network=resnet8")
    told = shell.run(f"{line} {SMALL} method=ind tracking=none run.name=ind")
    assert "one process on cpu" in told and " with evaluation; Ctrl-C saves" in told
    return [shell.here / "runs" / name for name in ("dice", "ind")]


def result_of(run):
    return json.loads((run / "evaluation.json").read_text())


def test_one_member_is_measured_beside_the_whole(shell, runs):
    before = {path: path.read_bytes() for path in runs[0].iterdir() if path.is_file()}
    told = shell.run("dicedist evaluate run=runs/dice members=[0]")
    assert told.splitlines()[-1] == "done: runs/dice/evaluations/members-0/evaluation.json"
    assert {path: path.read_bytes() for path in before} == before


def test_an_ood_set_is_added_and_dropped(shell, runs):
    told = shell.run("dicedist evaluate run=runs/dice 'ood.sets.rauschen=~/Rauschen 1.npy'")
    assert "rauschen" in told and set(result_of(runs[0])["ood"]) == {"rauschen"}
    assert "rauschen" in (runs[0] / "report.html").read_text()
    shell.run("dicedist evaluate run=runs/dice")
    assert set(result_of(runs[0])["ood"]) == {"rauschen"}, "another evaluation loses nothing"
    shell.run("dicedist evaluate run=runs/dice ood.sets.rauschen=none")
    assert result_of(runs[0])["ood"] == {} and "rauschen" not in (runs[0] / "report.html").read_text()


def test_a_mistyped_ood_set_is_told_before_work(shell, runs):
    shell.run("dicedist evaluate run=runs/dice ood.sets.rauchsen=none", code=2)
    assert shell.told == "dicedist: ood.sets.rauchsen=none: there is no such set\n"
    shell.run("dicedist evaluate run=runs/dice ood.sets.rauschen=~/Rauchen.npy", code=2)
    assert shell.told.count("\n") == 1 and "there is no such file or folder" in shell.told


def test_two_runs_are_compared_on_one_page(shell, runs):
    assert shell.run("dicedist report runs/dice runs/ind").startswith("wrote report.html")
    page = (shell.here / "report.html").read_text()
    assert "report --fresh" in page, "own discriminators are not compared"
    assert shell.run("dicedist report runs/").startswith("wrote report-2.html")


def test_a_run_goes_on_and_keeps_what_it_found(shell, runs):
    line = documented("python -m dicedist.train data=shapes network=resnet8")
    told = shell.run(f"{line} {SMALL} method=ind tracking=none run.name=ind max_steps=4")
    assert "continues after step 3 in runs/ind" in told and result_of(runs[1])["step"] == 4
    assert result_of(runs[1] / "evaluations/step-3")["step"] == 3


def test_a_sweep_of_the_readme(shell):
    line = documented("dicedist sweep redundancy.delta=0.1,0.2 seed=0,1,2")
    line = line.replace(" sweep ", " sweep --nproc 1 --at-once 1 ").replace("0,1,2", "0,1")
    told = shell.run(f"{line} data=shapes {SMALL} ensemble.size=2 max_steps=1 tracking=none")
    assert "4 runs in runs/sweep, 1 process each, 1 at once" in told
    header = next(line for line in told.splitlines() if line.startswith("redundancy.delta"))
    assert "validation accuracy, %" in header and "tempered NLL, nats" in header and "ratio-error" in header
    assert told.splitlines()[-1] == "done: runs/sweep/report.html, runs/sweep/results.csv"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("method=dcie", "method=dcie: there is no such method (did you mean dice?)"),
        ("redundancy.dleta=1", "redundancy.dleta: there is no such key (did you mean redundancy.delta?)"),
        ("epochs=0", "epochs=0: write a number above 0"),
        ("network=resnet9", "network=resnet9: there is no such network (did you mean resnet"),
    ],
)
def test_a_misspelling_is_one_line(shell, words, line):
    shell.run(f"dicedist train data=shapes {words}", code=2)
    assert shell.told.startswith(f"dicedist: {line}") and shell.told.count("\n") == 1


def test_a_bar_on_a_real_terminal(shell):
    """Under `script`, which gives the command a terminal of its own."""
    line = f"dicedist train data=shapes {SMALL} ensemble.size=2 tracking=none run.name=terminal"
    drawn = shell.run(f"script --quiet --return --command '{line}' /dev/null")
    assert "░" * 24 + " step 0/3" in drawn and "█" * 24 in drawn
    lines = drawn.replace("\r\n", "\n").split("\r\x1b[2K")
    assert all(len(line.splitlines()[0]) < 80 for line in lines if "░" in line), "no line wraps"
    assert "validation images" in drawn and "test images" in drawn
