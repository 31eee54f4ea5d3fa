"""The wheel holds conf/ and templates, pins fit ranges; launch/install and launch/docker do their part."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dicedist import evidence, mirror, train
from dicedist.config.extras import PACKAGES
from tests.support import CHECKOUT as ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = [
    path
    for path in (*ROOT.glob("launch/*"), ROOT / ".ci/run")
    if path.is_file() and path.read_text().startswith("#!/usr/bin/env bash")
]

# Stands in for the interpreter outside and inside .venv; it writes its arguments to $ASKED.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$ASKED"
case "$*" in
    "-c "*version_info*) exit "${BAD_VERSION:-0}" ;;
    "-c "*ensurepip*) exit "${NO_VENV:-0}" ;;
    "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip install "*) echo "pip says hello"; exit "${PIP_FAILS:-0}" ;;
esac
"""


def test_wheel_carries_every_config(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True, capture_output=True)
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"dicedist/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.*")}
    assert {f"dicedist/conf/{name}" for name in ("train.yaml", "cells.csv", "paper.csv")} <= configs
    assert configs <= names
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dicedist/reporting/templates").rglob("*.*")}
    assert "dicedist/reporting/templates/page.html" in templates and templates <= names
    assert "dicedist/py.typed" in names


def test_extras_are_what_the_code_asks_for() -> None:
    """Every extra that a message names exists, brings its packages, and is in `all` unless another stands for it."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    for extra, modules in PACKAGES.items():
        brought = {Requirement(line).name for line in extras[extra]}
        assert set(modules) <= brought and extra in everything.extras
    for source in (ROOT / "dicedist").rglob("*.py"):
        assert set(re.findall(r"dicedist\[([a-z0-9-]+)\]", source.read_text())) <= set(extras), source


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: train.run(["data=shapes", "tracking=mlflow"]),
            r"tracking=mlflow needs mlflow: pip install 'dicedist\[mlflow\]', or write",
        ),
        (
            lambda: train.run(["data=shapes", "tracking=[tensorboard,wandb]"]),
            r"tracking=tensorboard needs tensorboard: pip install 'dicedist\[tensorboard\]', or write tracking=none",
        ),
        (lambda: evidence.run(["digits"]), r"dicedist evidence needs optuna: pip install 'dicedist\[search\]'"),
        (lambda: mirror.run(["runs/NAME", "tracking=wandb"]), r"dicedist mirror needs wandb: pip install"),
        (lambda: mirror.run(["runs/NAME"]), r"dicedist mirror needs mlflow: pip install 'dicedist\[mlflow\]'"),
    ],
)
def test_a_missing_extra_is_one_line(call: Callable, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dicedist.config.extras.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=line):
        call()


def test_pins_satisfy_ranges() -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {}
    for pin in (Requirement(line) for line in lines if line):
        (exact,) = pin.specifier
        assert exact.operator == "=="
        pins[canonicalize_name(pin.name)] = exact.version
    project = PYPROJECT["project"]
    ranges = PYPROJECT["build-system"]["requires"] + project["dependencies"]
    for extra in project["optional-dependencies"].values():
        ranges += extra
    others = [requirement for requirement in map(Requirement, ranges) if requirement.name != "dicedist"]
    for requirement in others:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


Install = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout in a folder whose name has a space."""
    project = tmp_path / "my project"
    (project / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch/install", project / "launch/install")
    for name in ("pyproject.toml", "constraints.txt"):
        (project / name).write_text(name)
    return project


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Runs a checkout's launch/install from another folder with the fake interpreter; variables cause its faults."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(project: Path, *arguments: str, **faults: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHON": str(python), "ASKED": str(tmp_path / "asked")} | faults
        command = [project / "launch/install", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def pip_calls(project: Path) -> int:
    asked = (project.parent / "asked").read_text().splitlines()
    return sum(line.startswith("-m pip install") for line in asked)


def test_install_runs_again_only_after_a_change(project: Path, install: Install) -> None:
    first, second = install(project, "dev"), install(project, "dev")
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout and not second.stdout
    assert "--editable .[all,dev]" in (project.parent / "asked").read_text()
    install(project)
    assert pip_calls(project) == 1, "dev contains the plain install"

    (project / "constraints.txt").write_text("changed")
    install(project, "dev")
    assert pip_calls(project) == 2

    moved = project.rename(project.parent / "moved")
    install(moved, "dev")
    assert pip_calls(moved) == 3, "an editable install points at the old folder"


def test_extra_is_installed_after_the_plain_install(project: Path, install: Install) -> None:
    install(project)
    install(project, "dev")
    assert pip_calls(project) == 2


def test_failed_install_shows_the_log_and_is_tried_again(project: Path, install: Install) -> None:
    failed = install(project, PIP_FAILS="1")
    assert failed.returncode == 1
    assert "pip says hello" in failed.stderr
    assert install(project).returncode == 0
    assert pip_calls(project) == 2


@pytest.mark.parametrize(
    ("faults", "message"),
    [({"BAD_VERSION": "1"}, "no Python 3.11, 3.12 or 3.13 found"), ({"NO_VENV": "1"}, "has no venv module")],
)
def test_unusable_python_is_one_clear_line(
    project: Path, install: Install, faults: dict[str, str], message: str
) -> None:
    refused = install(project, **faults)
    assert refused.returncode == 1
    assert message in refused.stderr and refused.stderr.count("\n") == 1
    assert not (project / ".venv").exists()


@pytest.fixture
def docker(tmp_path: Path) -> Callable[..., tuple[list[str], list[str]]]:
    """Runs a copy of launch/docker with a fake docker; returns the words of its build and of its run."""
    project, tools = tmp_path / "my project", tmp_path / "tools"
    (project / "launch").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / "launch/docker", project / "launch/docker")
    asked = tmp_path / "asked"
    write_tool(tools / "docker", f'printf "%s\\n" "$@" END >>"{asked}"; exit "${{DOCKER_FAILS:-0}}"')
    write_tool(tools / "nvidia-smi", '[[ -n ${GPUS:-} ]] && echo "GPU 0: $GPUS"')

    def run(*arguments: str, **variables: str) -> tuple[list[str], list[str]]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MLFLOW_"))}
        environment = inherited | {"PATH": f"{tools}:{os.environ['PATH']}", "DICEDIST_DATA": str(tmp_path / "data")}
        asked.unlink(missing_ok=True)
        command = [project / "launch/docker", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
        assert done.returncode == int(variables.get("DOCKER_FAILS", 0)), done.stderr
        build, started, *_ = [call.splitlines() for call in f"{asked.read_text()}".split("END\n")]
        return build, started

    return run


def write_tool(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_docker_gets_volumes_user_and_arguments(docker: Callable, tmp_path: Path) -> None:
    build, run = docker("evaluate", "run=runs/my run")
    assert build[0] == "build" and build[-1] == "." and "--secret" not in build
    assert run[0] == "run" and run[-3:] == ["dicedist", "evaluate", "run=runs/my run"]
    text = " ".join(run)
    for flag in ("--rm", "--init", "--shm-size 1g", f"--user {os.getuid()}:{os.getgid()}"):
        assert flag in text
    assert f"--volume {tmp_path}/data:/data --volume {tmp_path}/my project/runs:/workspace/runs" in text
    assert (tmp_path / "data").is_dir() and (tmp_path / "my project/runs").is_dir()
    assert "--gpus" not in run and "--tty" not in run and "DICEDIST_DATA" not in run


def test_docker_gets_gpus_variables_and_secrets_where_there_are_any(docker: Callable) -> None:
    given = {"MLFLOW_TRACKING_URI": "http://tracking", "DICEDIST_NPROC": "3", "PIP_CERT": "/my certificates"}
    build, run = docker(GPUS="some", **given)
    assert "id=certificates,src=/my certificates" in build
    assert run[-3:] == ["--gpus", "all", "dicedist"]
    for name in ("MLFLOW_TRACKING_URI", "DICEDIST_NPROC"):
        assert run[run.index(name) - 1] == "--env", "by its name alone: values may be secret"


def test_nothing_is_run_if_the_image_cannot_be_built(docker: Callable) -> None:
    _, run = docker(DOCKER_FAILS="1")
    assert not run


def test_image_is_told_what_the_code_reads() -> None:
    """The Dockerfile repeats names that other files define."""
    text = (ROOT / "Dockerfile").read_text()
    assert f"{train.NPROC}=auto" in text and "DICEDIST_DATA=/data" in text
    assert 'ENTRYPOINT ["dicedist"]' in text and "dicedist" in PYPROJECT["project"]["scripts"]
    copied = set(re.findall(r"^COPY ((?:(?!--)\S+ )+)\S+$", text, re.MULTILINE))
    names = {name for words in copied for name in words.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert names == kept and all((ROOT / name).exists() for name in names)
