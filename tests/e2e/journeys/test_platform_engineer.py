"""A platform engineer runs trainings with MLflow, stops and moves them, and reads exit codes."""

import shutil

import pytest
from mlflow import MlflowClient

from tests.support.journeys import SMALL, documented

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tracked(shell):
    """A training with MLflow where nobody configured anything, over two processes."""
    line = f"dicedist train --nproc 2 data=shapes {SMALL} ensemble.size=2 run.name=tracked"
    told = shell.run(f"{line} tracking.register=shapes")
    assert "sending the results to MLflow ..." in told
    assert "done: runs/tracked/report.html" in told.splitlines() and "it/s]" not in shell.told
    client = MlflowClient(f"sqlite:///{shell.here}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dicedist").experiment_id])
    return client, run


def test_mlflow_knows_what_it_was(shell, tracked):
    client, run = tracked
    assert run.info.status == "FINISHED" and run.info.run_name == "tracked"
    tags, params = run.data.tags, run.data.params
    assert tags["dicedist.members"] == "2" and tags["mlflow.user"] and "report.html" in tags["mlflow.note.content"]
    assert params["redundancy.delta"] == "auto" and params["redundancy.delta.resolved"] == "0.1"
    assert run.inputs.dataset_inputs[0].dataset.name == "shapes"
    for name in ("train/redundancy_nats", "schedule/learning_rate", "test/redundancy/nats", "test/ensemble/accuracy"):
        assert name in run.data.metrics, name
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "config.yaml", "evaluation.json", "figures"} <= files
    assert client.get_registered_model("shapes").latest_versions[0].version == 1


def test_a_new_evaluation_is_sent(shell, tracked):
    client, run = tracked
    shell.run("dicedist evaluate run=runs/tracked folds=1 estimator=own")
    assert client.get_run(run.info.run_id).data.metrics["test/ensemble/accuracy"] >= 0
    told = shell.run(documented("python -m dicedist.mirror runs/NAME").replace("NAME tracking=wandb", "tracked"))
    assert told.startswith("runs/tracked is in MLflow at sqlite:///") and "FINISHED" in told


def test_a_run_that_was_moved_makes_no_second_store(shell, tracked):
    elsewhere = shell.home / "woanders"
    shutil.copytree(shell.here / "runs/tracked", elsewhere / "runs/tracked")
    shell.run("cd ~/woanders && dicedist mirror runs/tracked", code=2)
    assert "tracking.uri=" in shell.told and shell.told.count("\n") == 1 and not (elsewhere / "mlflow.db").exists()
    shell.run("dicedist mirror", code=2)
    assert "name one run to send" in shell.told


def test_asked_to_stop_it_saves_and_the_same_command_continues(shell):
    line = f"dicedist train data=shapes {SMALL} ensemble.size=2 tracking=none run.name=stopped max_steps=40"
    waiting = "until grep --quiet step runs/stopped/metrics.jsonl; do sleep 0.2; done 2>/dev/null"
    shell.run(f"{line} & {waiting}; kill -TERM $!; wait $!", code=75)
    assert "saved; the same command continues the run" in shell.told and shell.told.count("\n") == 1
    assert "continues after step" in shell.run(line.replace("max_steps=40", "max_steps=41"))


def test_refusals_are_one_line_and_2_before_anything_is_made(shell):
    shell.run("dicedist train --nproc 2 data=shapes epochs=0 run.name=refused", code=2)
    assert shell.told == "dicedist: epochs=0: write a number above 0\n"
    assert not (shell.here / "runs/refused").exists()
    line = documented("torchrun --nproc_per_node=5 -m dicedist.train")
    told = shell.run(f"{line} data=shapes ensemble.size=3 run.name=refused 2>&1 || true")
    refusal = "5 ranks are too many for 3 members and a discriminator: torchrun --nproc_per_node=4 -m dicedist.train"
    first, _, banner = told.partition("ChildFailedError")
    assert f"dicedist: {refusal}" in first and refusal in banner, "torchrun's banner ends with our line"


def test_files_are_for_whom_the_umask_allows(shell):
    shell.run(f"umask 022; dicedist train data=shapes {SMALL} ensemble.size=2 tracking=none run.name=shared")
    modes = {path.stat().st_mode & 0o777 for path in (shell.here / "runs/shared").rglob("*") if path.is_file()}
    assert modes == {0o644}


def test_version_and_completion(shell):
    assert shell.run("dicedist --version").startswith("dicedist ")
    shell.run(documented("dicedist completion bash >> ~/.bashrc"))
    shell.run("bash -n ~/.bashrc")
