"""The contract between rooms holds, and fails when it is broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import CHECKOUT


def lint(folder):
    script = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [script, "--no-cache"], cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(folder)}
    )


@pytest.mark.parametrize(
    ("room", "line", "broken"),
    [
        ("algorithm/pairs.py", "import dicedist.runs.run", "dicedist.algorithm is not allowed to import dicedist.runs"),
        ("config/schema.py", "import torch", "dicedist.config is not allowed to import torch"),
        ("evaluation/readings.py", "import mlflow", "dicedist.evaluation is not allowed to import mlflow"),
        ("algorithm/step.py", "import os", "dicedist.algorithm is not allowed to import os"),
    ],
)
def test_a_broken_contract_is_noticed(tmp_path, room, line, broken):
    shutil.copytree(CHECKOUT / "dicedist", tmp_path / "dicedist", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    file = tmp_path / "dicedist" / room
    file.write_text(f"{line}\n{file.read_text()}")
    done = lint(tmp_path)
    assert done.returncode == 1 and broken in " ".join(done.stdout.split()), done.stdout


def test_only_the_room_cluster_names_torch_distributed():
    elsewhere = [
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "dicedist").rglob("*.py")
        if "torch.distributed" in path.read_text() and "cluster" not in path.parts
    ]
    assert elsewhere == ["dicedist/algorithm/__init__.py"]  # whose docstring only mentions it
