"""The contract between rooms holds, and fails when it is broken."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dicedist.metrics import measures
from dicedist.metrics.measures import ALL
from dicedist.runs.results import Results
from dicedist.runs.run import Run
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
        if "torch.distributed" in path.read_text() and "cluster" not in path.relative_to(CHECKOUT).parts
    ]
    assert elsewhere == ["dicedist/algorithm/__init__.py"]  # whose docstring only mentions it


def modules(*without):
    """Every module of the package with its syntax tree, but for some."""
    for path in sorted((CHECKOUT / "dicedist").rglob("*.py")):
        name = path.relative_to(CHECKOUT / "dicedist").as_posix()
        if name not in without:
            yield name, ast.parse(path.read_text())


def texts(tree):
    """The string constants of a module, docstrings left out."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return [node.value for node in found if isinstance(node.value, str)]


def test_only_run_py_knows_the_names_of_a_runs_files():
    folder = Path("a-run")
    members = [getattr(Run(folder), name) for name in dir(Run) if name.endswith("_file")]
    files = [member.name for member in members if isinstance(member, Path)]
    files = [file for file in files if not file.startswith(".")]  # the cache of data has a .lock, too
    assert {"config.yaml", "evaluation.json", "logits.safetensors", "metrics.jsonl", "report.html"} <= set(files)
    elsewhere = [
        (module, text)
        for module, tree in modules("runs/run.py", "runs/results.py")
        for text in texts(tree)
        if " " not in text and text.endswith(tuple(files))
    ]
    assert elsewhere == []


def test_only_run_py_builds_a_path_inside_a_run():
    """Find `run.directory / ...`, for any name of the variable."""
    owned = {"directory", "checkpoints"}
    assert owned <= {*vars(Results("a")), *dir(Run)}
    joined = [
        f"{module}:{node.lineno}"
        for module, tree in modules("runs/run.py", "runs/results.py", "runs/checkpoint.py", "runs/queue.py")
        if not module.startswith("studies/")  # a queue and a study have folders of their own
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and isinstance(node.left, ast.Attribute)
            and node.left.attr in owned
        )
    ]
    assert joined == []


def test_measures_are_listed_once():
    """Titles are read from metrics/measures.py, which is what makes one entry enough."""
    titles = {measure.title for measure in ALL if not measure.title.islower()} - {"T"} | {"ratio-error"}
    assert {"NLL", "ECE", "TACE", "AUROC"} <= titles
    titles |= {title for title in measures.OOD_SCORES.values() if not title.islower()}
    told = [(name, text) for name, tree in modules("metrics/measures.py") for text in texts(tree) if text in titles]
    assert told == []
