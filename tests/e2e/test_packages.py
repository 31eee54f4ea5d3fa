"""The wheel and the sdist, installed in clean environments with each extra: `./launch/test -m slow FILE`, with uv."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import CHECKOUT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="pip install uv: it links packages instead of copying 5 GB"),
]
EXTRAS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs", "test"}  # which launch/install installs from a checkout
REPOSITORY = "https://example.org/dicedist"
TRAINING = ["data=shapes", "network=resnet8", "ensemble.size=2", "max_steps=2", "data.pipeline=torch", "tracking=none"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist as the release workflow builds them."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(
        build, cwd=CHECKOUT, env=os.environ | {"DICEDIST_REPOSITORY": REPOSITORY}, check=True, capture_output=True
    )
    return folder


def test_metadata(dist: Path) -> None:
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout


@pytest.mark.parametrize("package", ["*.whl", "*.tar.gz"])
@pytest.mark.parametrize("extra", ["", *sorted(EXTRAS.keys() - FOR_DEVELOPERS)])
def test_install(package: str, extra: str, dist: Path, tmp_path: Path) -> None:
    (file,) = dist.glob(package)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | {"VIRTUAL_ENV": str(tmp_path / "env"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("uv", "venv", "--python", sys.executable, "env")
    run("uv", "pip", "install", "--constraints", CHECKOUT / "constraints.txt", f"dicedist[{extra}] @ {file.as_uri()}")
    run("uv", "pip", "check")
    assert "train" in run("env/bin/dicedist", "--help")
    installed = run("uv", "pip", "list", "--format=freeze")
    for line in EXTRAS.get(extra, []):
        name = canonicalize_name(Requirement(line).name)  # as uv prints it
        assert name == "dicedist" or f"{name}==" in installed
    if extra == "":
        assert "mlflow" not in installed and "dali" not in installed and "onnx" not in installed
        run("env/bin/dicedist", "train", *TRAINING, "run.name=tiny")
        assert (tmp_path / "runs/tiny/report.html").exists()
    shutil.rmtree(tmp_path / "env")
