"""The one command `dicedist`: it lists its commands, passes arguments on, and names the nearest to a misspelt one."""

import contextlib
import os
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from dicedist import __main__ as cli
from dicedist import export, train
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
    assert f"-m dicedist.{name} " in shown or f"launch/{name} " in shown


@pytest.fixture
def dispatched(monkeypatch):
    """What `dicedist ARGUMENTS` would run, and with which arguments."""

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
    with pytest.raises(ValueError, match="^evalute: there is no such command; did you mean evaluate?"):
        refuse(arguments)


def test_console_script():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dicedist"]
    module, _, function = script.partition(":")
    assert getattr(import_module(module), function) is cli.main


@pytest.fixture
def started(monkeypatch):
    """What `dicedist train ARGUMENTS` does with some GPUs: ("here", its config), or (processes, their overrides)."""

    def start_training(*arguments, gpus=0, **environment):
        told = []
        for name in ("RANK", train.NPROC):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("dicedist.trainer.train", lambda config: told.append(("here", config)))
        monkeypatch.setattr(
            "os.execv", lambda program, words: told.append((int(words[3].partition("=")[2]), words[6:]))
        )
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
    with pytest.raises(ValueError, match=f"^--nproc {nproc} .*DICEDIST_NPROC.*write a number above 0, or auto"):
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


def test_train_over_processes_under_the_launcher(tmp_path):
    words = [sys.executable, "-m", "dicedist", "train", "--nproc", "2", *TINY, "max_steps=1", f"run.dir={tmp_path}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "member 1, discriminator" in done.stdout
    refused = subprocess.run([*words, "seed=1"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, "the launcher's exit code and one line"
