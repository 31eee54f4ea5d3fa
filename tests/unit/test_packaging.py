"""The wheel holds conf/ and templates, pins fit ranges; launch/install and launch/docker do their part."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dicedist import evidence, mirror, train
from dicedist.config import compose_config
from dicedist.config.commands import COMMANDS
from dicedist.config.extras import PACKAGES
from tests.support import CHECKOUT as ROOT

REPOSITORY = "https://example.org/dicedist"
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
    "-m pip config list") echo "${PIP_CONFIGURED:-}" ;;
    "-m pip install "*) echo "pip says hello"; exit "${PIP_FAILS:-0}" ;;
esac
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as the release workflow builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    environment = os.environ | {"DICEDIST_REPOSITORY": f"{REPOSITORY}/"}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_carries_every_config(wheel: Path) -> None:
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
    everything = contained(extras, "all")
    for extra, modules in PACKAGES.items():
        brought = {Requirement(line).name for line in extras[extra]}
        assert set(modules) <= brought and extra in everything
    for source in (ROOT / "dicedist").rglob("*.py"):
        assert set(re.findall(r"dicedist\[([a-z0-9-]+)\]", source.read_text())) <= set(extras), source


def contained(extras: dict[str, list[str]], name: str) -> set[str]:
    """Return the extras that an extra consists of, itself included."""
    others = {other for line in extras[name] if (it := Requirement(line)).name == "dicedist" for other in it.extras}
    return {name}.union(*(contained(extras, other) for other in others))


def test_an_install_for_the_cpu_has_all_but_cuda() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert contained(extras, "all") - contained(extras, "all-cpu") == {"all", "dali"}
    core = {Requirement(line).name for line in PYPROJECT["project"]["dependencies"]}
    assert not core & {"mlflow", "onnx", "onnxruntime", "nvidia-dali-cuda130", "optuna", "pyarrow", "timm"}


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


def test_mlflow_skinny_suffices_for_a_server_that_gets_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lambda name: None if name == "sqlalchemy" else object()  # noqa: E731
    monkeypatch.setattr("dicedist.config.extras.find_spec", found)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    server, no_model = "tracking.uri=http://127.0.0.1:5000", "tracking.model=null"
    assert compose_config(["data=shapes", server, no_model]).tracking.trackers == ["mlflow"]
    for words in ([], [server], [no_model]):
        assert compose_config(["data=shapes", *words]).tracking.trackers == []
        with pytest.raises(ValueError, match="mlflow-skinny sends records to a server and no model: write"):
            train.run(["data=shapes", "tracking=mlflow", *words])


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
    (project / "pyproject.toml").write_text("")
    (project / "constraints.txt").write_text("torch==2.14.1\ntorchmetrics==1.9.0\ntorchvision==0.29.1 # a comment\n")
    return project


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Runs a checkout's launch/install from another folder with the fake interpreter; variables cause its faults."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(project: Path, *arguments: str, **faults: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path / 'tools'}:/usr/bin:/bin"  # a test may put a uv there
        environment = os.environ | {"PATH": path, "PYTHON": str(python), "ASKED": str(tmp_path / "asked")} | faults
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


def test_the_list_of_cells_installs_nothing(project: Path) -> None:
    shutil.copy(ROOT / "launch/paper", project / "launch/paper")
    (project / "conf").mkdir()
    shutil.copy(ROOT / "conf/paper.csv", project / "conf/paper.csv")
    (project / "launch/install").write_text("#!/usr/bin/env bash\necho installed >>asked\nexit 1\n")
    (project / "launch/install").chmod(0o755)
    told = subprocess.run([project / "launch/paper", "--list"], capture_output=True, text=True)
    assert told.returncode == 0 and not told.stderr and not (project / "asked").exists()
    head, *rows = told.stdout.splitlines()
    assert head.split() == ["cell", "table", "measure", "paper"]
    assert rows[0].split() == ["cifar10/resnet110-branch3-adp", "cifar10", "ensemble.accuracy", "95.43", "+-", "0.12"]
    assert subprocess.run([project / "launch/paper", "--table", "ood"], capture_output=True).returncode == 1
    assert (project / "asked").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_no_script_that_the_wheel_lacks(name: str) -> None:
    assert "launch/" not in (import_module(f"dicedist.{name}").__doc__ or "")


def test_extra_is_installed_after_the_plain_install(project: Path, install: Install) -> None:
    install(project)
    install(project, "dev")
    assert pip_calls(project) == 2


def test_install_for_the_cpu_is_remembered(project: Path, install: Install) -> None:
    install(project)
    install(project, "--cpu", "dev")
    asked = (project.parent / "asked").read_text().splitlines()
    plain, torch, light = [line for line in asked if "pip install" in line]
    assert plain.endswith("--editable .[all]") and light.endswith("--editable .[all-cpu,dev]")
    pins = "torch==2.14.1+cpu torchvision==0.29.1+cpu"
    assert torch.endswith(f"--no-deps --index-url https://download.pytorch.org/whl/cpu {pins}")
    assert not any("--extra-index-url" in line for line in asked), "no other package is looked up there"
    install(project, "dev")
    install(project)
    assert pip_calls(project) == 3, "what launch/test and launch/quickstart ask for is there, without CUDA"


def test_without_the_index_of_torch_for_cpus_nothing_else_is_installed(project: Path, install: Install) -> None:
    failed = install(project, "--cpu", PIP_FAILS="1", TORCH_CPU_INDEX="file:///nowhere")
    assert failed.returncode == 1 and "pip says hello" in failed.stderr
    assert pip_calls(project) == 1 and "--index-url file:///nowhere torch==" in (project.parent / "asked").read_text()


@pytest.mark.parametrize("configured", ["", "global.index-url='https://example.org'"])
def test_uv_installs_where_it_knows_the_index(project: Path, install: Install, configured: str) -> None:
    (tools := project.parent / "tools").mkdir()
    write_tool(tools / "uv", 'echo "uv $*" >>"$ASKED"')
    done = install(project, "--cpu", PIP_CONFIGURED=configured)
    asked = (project.parent / "asked").read_text()
    assert done.returncode == 0 and pip_calls(project) == 2 * bool(configured)
    options = "--constraints constraints.txt --build-constraints constraints.txt --torch-backend cpu"
    by_uv = f"uv pip install --python .venv/bin/python --editable .[all-cpu] {options}"
    assert (by_uv in asked) == (not configured)


def test_failed_install_shows_the_log_and_is_tried_again(project: Path, install: Install) -> None:
    failed = install(project, PIP_FAILS="1")
    assert failed.returncode == 1
    assert "pip says hello" in failed.stderr
    assert install(project).returncode == 0
    assert pip_calls(project) == 2


@pytest.mark.parametrize(
    ("faults", "message"),
    [({"BAD_VERSION": "1"}, "no Python 3.11 to 3.14 found"), ({"NO_VENV": "1"}, "has no venv module")],
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


IMPORTED = {"nvidia-dali-cuda130": "nvidia.dali"}  # package -> module, where they differ
NEEDS = {  # what stands in a command or its config -> the package that it imports
    "s3://": "s3fs",
    "gs://": "gcsfs",
    "timm/": "timm",
    "search=optuna": "optuna",
    "tracking=mlflow": "mlflow",
    "tracking=wandb": "wandb",
    "tracking=tensorboard": "tensorboard",
    "data.pipeline=dali": "nvidia-dali-cuda130",
    "format=onnx": "onnx",
}


def container_commands() -> dict[str, list[str]]:
    """The words after `train` in every manifest, and in every documented command that runs in the image."""
    found = {}
    for file in sorted((ROOT / "launch/k8s").glob("*.yaml")):
        for nth, document in enumerate(yaml.safe_load_all(file.read_text())):
            lists = re.findall(r"'args': (\[[^]]*\])", str(document))
            found |= {f"{file.name} {nth}": ast.literal_eval(words) for words in lists}
    for file in (ROOT / "docs/docker.md", ROOT / "docs/clusters.md", ROOT / "launch/k8s/README.md"):
        text = file.read_text().replace("\\\n", " ")
        for nth, words in enumerate(re.findall(r"dicedist[ .]train((?: +[a-z_.]+=[^\s`]+)+)", text)):
            found[f"{file.name} {nth}"] = words.split()
    return found


def test_the_image_has_what_its_manifests_and_documented_commands_need() -> None:
    (extras,) = re.findall(r"cuda\) extras=(\S+) ;;", (ROOT / "Dockerfile").read_text())
    asked = [sys.executable, ROOT / "launch/image-requirements", f"{extras},gs"]
    lines = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    installed = {canonicalize_name(Requirement(line).name) for line in lines}
    assert set(NEEDS.values()) <= installed
    commands = container_commands()
    assert len(commands) > 5 and any("run.remote=s3://" in word for words in commands.values() for word in words)
    for where, words in commands.items():
        composed = compose_config(words)
        needed = {package for mark, package in NEEDS.items() if mark in f"{' '.join(words)} {composed}"}
        assert needed <= installed, where
        assert all(find_spec(IMPORTED.get(package, package)) for package in needed), where


def test_readme_of_a_release_has_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        metadata = files.read(name).decode()
    assert f"Project-URL: Source, {REPOSITORY}\n" in metadata
    assert f"]({REPOSITORY}/raw/v0.1.0/docs/step.svg)" in metadata
    assert f"]({REPOSITORY}/blob/v0.1.0/docs/methods.md)" in metadata
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.partition("\n\n")[2]) == []


WORKFLOWS = [(path, yaml.safe_load(path.read_text())) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]


@pytest.mark.parametrize(("path", "workflow"), WORKFLOWS, ids=lambda value: getattr(value, "name", ""))
def test_workflows_run_what_is_there(path: Path, workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for line in (step["run"] for step in job["steps"] if "run" in step):
            for word in line.split():
                assert not word.startswith(("./", "tests/")) or (ROOT / word).exists(), word


def test_workflows_test_every_python_that_is_promised() -> None:
    (tests,) = [workflow["jobs"]["tests"] for _, workflow in WORKFLOWS if "tests" in workflow["jobs"]]
    versions = tests["strategy"]["matrix"]["python"]
    project = PYPROJECT["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert versions == named and all(version in SpecifierSet(project["requires-python"]) for version in versions)
