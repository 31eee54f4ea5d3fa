"""One command for all: it lists what there is, passes the rest on, and names the nearest of what there is not."""

import contextlib
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dicedist import __main__ as cli
from dicedist import export, world

ROOT = Path(__file__).resolve().parent.parent


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
    with contextlib.suppress(SystemExit):  # of argparse
        import_module(f"dicedist.{name}").run(["--help"])
    shown = capsys.readouterr().out
    assert f"-m dicedist.{name} " in shown or f"launch/{name} " in shown


@pytest.fixture
def dispatched(monkeypatch):
    """What `dicedist ARGUMENTS` would run, and with which arguments."""

    def dispatch(*arguments):
        passed = []
        monkeypatch.setattr(sys, "argv", ["dicedist", *arguments])
        monkeypatch.setattr(world, "command", passed.append)
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
