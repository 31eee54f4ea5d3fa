"""The one command `dicedist`: it lists its commands, passes arguments on, and names the nearest to a misspelled one."""

import contextlib
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dicedist import __main__ as cli
from dicedist import __version__, export, train
from dicedist.config import compose_config
from dicedist.runs.run import Run
from tests.support import CHECKOUT as ROOT
from tests.support.tiny import TINY


def test_help_lists_commands_without_importing_torch():
    code = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_module('dicedist', run_name='__main__')"
    for arguments in ([], ["--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "dicedist predict run=runs/NAME photos/" in done.stdout
        listed = done.stdout.partition("Commands:\n")[2].splitlines()
        assert [line.split()[0] for line in listed] == cli.available()


def test_a_module_that_is_not_there_is_not_listed(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "fly", "to the moon")
    assert "fly" not in cli.available() and "train" in cli.available()


@pytest.mark.parametrize("name", cli.available())
def test_every_command_shows_examples(name, capsys):
    with contextlib.suppress(SystemExit):  # argparse exits after --help
        import_module(f"dicedist.{name}").run(["--help"])
    shown = capsys.readouterr().out
    assert f"-m dicedist.{name} " in shown or f"\n    dicedist {name} " in shown


@pytest.fixture
def dispatched(monkeypatch):
    """Record the command that `dicedist ARGUMENTS` would run, and its arguments."""

    def dispatch(*arguments):
        passed = []
        monkeypatch.setattr(sys, "argv", ["dicedist", *arguments])
        monkeypatch.setattr(cli, "command", passed.append)
        cli.main()
        return passed[0], sys.argv[1:]

    return dispatch


def test_arguments_are_passed_on(dispatched):
    assert dispatched("export", "run=runs/NAME") == (export.run, ["run=runs/NAME"])


def test_a_misspelling_is_named(dispatched):
    refuse, arguments = dispatched("evalute", "run=runs/NAME")
    with pytest.raises(ValueError, match="^evalute: there is no such command \\(did you mean evaluate"):
        refuse(arguments)


def test_console_script():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dicedist"]
    module, _, function = script.partition(":")
    assert getattr(import_module(module), function) is cli.main


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_a_reader_that_has_enough_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-u", "-m", "dicedist", *words], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.stderr == b""


@pytest.fixture
def started(monkeypatch):
    """Record what `dicedist train ARGUMENTS` does with some GPUs: ("here", config), or (processes, overrides)."""

    told = []

    def launch(program, words):
        assert [*words[1:3], *words[4:6]] == ["-m", "dicedist.launch", "-m", "dicedist.train"]
        told.append((int(words[3].removeprefix("--nproc_per_node=")), words[6:]))

    def start_training(*arguments, gpus=0, **environment):
        told.clear()
        for name in ("RANK", train.NPROC):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("dicedist.trainer.train", lambda config: told.append(("here", config)))
        monkeypatch.setattr("os.execv", launch)
        train.run(arguments)
        return told[0]

    return start_training


def test_processes_by_option_or_variable(started):
    assert started("seed=1") == ("here", compose_config(["seed=1"]))
    assert started("--nproc", "3", "seed=1") == (3, ["seed=1"])
    assert started("seed=1", DICEDIST_NPROC="3") == (3, ["seed=1"])
    assert started("--nproc=1", DICEDIST_NPROC="3") == ("here", compose_config([]))
    assert started("seed=1", DICEDIST_NPROC="3", RANK="0") == ("here", compose_config(["seed=1"]))


@pytest.mark.parametrize("nproc", ["0", "-1", "many"])
def test_impossible_number_of_processes(started, nproc):
    with pytest.raises(ValueError, match=rf"^--nproc \(or \$DICEDIST_NPROC\) {nproc}: write a number above 0, or auto"):
        started(f"--nproc={nproc}")


@pytest.mark.parametrize(
    ("gpus", "overrides", "processes"),
    [
        (0, [], "here"),
        (1, [], "here"),
        (2, [], 2),
        (8, [], 5),
        (8, ["method=ind"], 4),
        (8, ["ensemble.size=7"], 8),
        (8, ["ensemble.size=2"], 3),
    ],
)
def test_auto_is_a_process_a_gpu_for_the_same_ensemble(started, tmp_path, gpus, overrides, processes):
    given = [*overrides, f"run.dir={tmp_path}"]
    found, passed = started("--nproc", "auto", *given, gpus=gpus)
    assert found == processes
    told = given + ["ensemble.size=4"] * (not overrides or overrides == ["method=ind"])
    assert passed == (compose_config(told) if found == "here" else told)


def test_auto_continues_a_run_with_its_members(started, tmp_path):
    (tmp_path / "run").mkdir()
    overrides = [f"run.dir={tmp_path}", "run.name=run"]
    Run(tmp_path / "run").save_config(compose_config([*overrides, "ensemble.size=2"]))
    assert started("--nproc", "auto", *overrides, gpus=8) == (3, overrides)


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dicedist", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"dicedist {__version__}\n"


NETWORK = """
from torch import nn
class Mine(nn.Module):
    feature_dim = 12
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 12, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    def forward(self, images):
        return self.layers(images)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_network_of_ones_own_from_the_working_folder_reaches_mlflow(tmp_path):
    """By the console script, which has not the working folder among its paths."""
    (tmp_path / "mine.py").write_text(NETWORK)
    script = Path(sys.executable).with_name("dicedist")
    words = [
        script,
        "train",
        *TINY,
        "max_steps=1",
        "network._target_=mine.Mine",
        "network.trusted=true",
        "tracking=mlflow",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 x mine.Mine (net)" in done.stdout and "done: runs/tiny/report.html" in done.stdout.splitlines()
    assert "MLflow" not in done.stderr and "it/s]" not in done.stderr, "MLflow draws bars of its own"
    assert "memory per rank" not in done.stdout, "details are for --verbose"
    assert "\nnext: dicedist show runs/tiny, " in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1/1"], "told once"
    assert [*(tmp_path / "mlruns").rglob("ensemble.pt2")], "the model was logged, as training was trusted to run it"
    assert "mine.Mine" in (tmp_path / "runs/tiny/report.html").read_text()


@pytest.mark.timeout(300)
def test_the_one_line_is_the_last_of_a_plain_torchrun_too(tmp_path):
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "dicedist.train",
    ]
    done = subprocess.run([*words, *TINY, "epochs=0", f"run.dir={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    first, banner = done.stderr.split("ChildFailedError", 1)
    assert "dicedist: epochs=0: write a number above 0" in first and "epochs=0: write a number above 0" in banner
