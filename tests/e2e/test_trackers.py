"""TensorBoard and Weights & Biases get the records of a run once and in order, by their real libraries."""

import json
import os
import subprocess
import sys
import threading

import pytest
import wandb as library
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from dicedist import mirror as command
from dicedist.config import compose_config
from dicedist.runs.run import Run
from dicedist.tracking import mirror, tracker, wandb
from tests.support.servers import a_run, free_port, mirror_of, record
from tests.support.wandb_server import WandbServer

LOSS = "train/members/loss"
RESULT = {"ensemble": {"accuracy": 0.75, "nll": 0.5}, "members": {"accuracy": 0.5}, "ood": {}}


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    """Count event files as in a new process: their names end with a count, and 10 sorts before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def finished(monkeypatch):
    """Runs whose last checkpoint and results are whole, without making any."""
    monkeypatch.setattr(Run, "ending", lambda self: "FINISHED" if self.result() else "FAILED")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Nothing that the machine knows of W&B reaches a test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    library.teardown()  # the client reads the environment once in a process


def board(directory):
    found = EventAccumulator(str(directory))
    found.Reload()
    return found


def scalars(found, name=LOSS):
    return [(event.step, pytest.approx(event.value)) for event in found.Scalars(name)]


def rows(directory):
    """The history, summary and exit codes of a run's offline files, in the order in which they were made."""
    history, summary, codes, artifacts = [], {}, [], []
    for path in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        file = DataStore()
        file.open_for_scan(str(path))
        while (data := file.scan_data()) is not None:
            found = Record.FromString(data)
            kind = found.WhichOneof("record_type")
            if kind == "history":
                items = found.history.item
                history.append({"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items})
            elif kind == "summary":
                summary |= {one.key: json.loads(one.value_json) for one in found.summary.update if one.key}
            elif kind == "exit":
                codes.append(found.exit.exit_code)
            elif kind == "artifact":
                artifacts.append((found.artifact.type, found.artifact.name))
    return history, summary, codes, artifacts


def losses(directory):
    return [(row["_step"], row[LOSS]) for row in rows(directory)[0] if LOSS in row]


def rewritten(directory, steps):
    (directory / "metrics.jsonl").unlink()
    record(directory, steps)


def evaluated(directory):
    Run(directory).write_result(RESULT)
    Run(directory).report_file.write_text("<html>the report</html>")


def test_tensorboard_holds_exactly_the_records(finished, tmp_path):
    directory = a_run(tmp_path / "tiny", "tracking=tensorboard")
    with Run(directory).system_file.open("w") as file:
        file.write(json.dumps({"step": 2, "time": 1e9, "throughput/seconds_per_step": 0.5}) + "\n")
    assert mirror_of(directory, "tensorboard").finish()
    first = board(directory)
    assert scalars(first) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert "test/ensemble/accuracy" not in first.Tags()["scalars"]
    assert first.Scalars("throughput/seconds_per_step")[0].wall_time == 1e9
    config = first.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| `data._target_` | `None` |" in config  # else Markdown makes an emphasis of the underscores

    # The run goes back to a checkpoint and writes other lines: a TensorBoard that is open forgets the old ones.
    rewritten(directory, (2, 4))
    evaluated(directory)
    sender = mirror_of(directory, "tensorboard")
    sender.send_records()
    record(directory, (6,))
    assert sender.finish()
    first.Reload()
    for found in (first, board(directory)):
        assert scalars(found) == [(2, 0.5), (4, 0.25), (6, 1 / 6)]
        assert scalars(found, "test/ensemble/accuracy") == [(6, 0.75)]
    assert found.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == "hparams"
    evaluated(directory)
    for _ in range(2):
        assert mirror_of(directory, "tensorboard").finish()
        assert len(Run(directory).event_files) <= 3, "of the last start one, of this one the records and what compares"


def test_tensorboard_forgets_lines_that_are_written_otherwise_while_it_is_open(tmp_path):
    """The mirror of a run that continues with another learning rate starts before the old lines are cut off."""
    directory = a_run(tmp_path / "tiny", "tracking=tensorboard")
    with Run(directory).system_file.open("w") as file:
        file.write(json.dumps({"step": 1, "time": 1e9, "throughput/seconds_per_step": 0.5}) + "\n")
    sender = mirror_of(directory, "tensorboard")
    sender.send_records()
    rewritten(directory, (2, 3, 4, 5))
    sender.send_records()
    record(directory, (6,))
    sender.send_records()
    assert [step for step, _ in scalars(board(directory))] == [2, 3, 4, 5, 6]
    assert len(scalars(board(directory), "throughput/seconds_per_step")) == 1


def test_tensorboard_compares_runs_by_what_was_chosen(tmp_path):
    directory = a_run(tmp_path / "tiny", "redundancy.delta=0.3", "data.root=/somewhere", "optimizer.betas=[0.8,0.9]")
    found = mirror_of(directory, "tensorboard").destination.hyperparameters()
    assert found["redundancy.delta"] == 0.3 and found["data.name"] == "shapes" and found["seed"] == 0
    assert found["optimizer.betas"] == "[0.8, 0.9]"
    assert not {"data.root", "run.name", "tracking.model", "redundancy.tau", "data.val_fraction"} & found.keys()


def test_a_run_that_resumes_continues_its_run_in_wandb(finished, offline, tmp_path, capsys):
    directory = a_run(tmp_path / "tiny", "tracking=wandb", "tracking.study=many")
    with Run(directory).system_file.open("w") as file:
        for step in (2, 1):  # nothing is taken from this file when a run goes back
            file.write(json.dumps({"step": step, "time": 1e9, "throughput/seconds_per_step": 0.5}) + "\n")
    assert mirror_of(directory, "wandb").finish()
    first = Run(directory).mirror_file("wandb").read_text()
    assert losses(directory) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]

    # The run goes back to a checkpoint after step 2, repeats step 3 and continues.
    rewritten(directory, range(1, 6))
    evaluated(directory)
    sender = mirror_of(directory, "wandb")
    assert sender.state["run_id"] == json.loads(first)["run_id"]
    assert sender.finish()
    history, summary, codes, artifacts = rows(directory)
    assert losses(directory) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.2)]
    assert [row["_step"] for row in history] == [1, 2, 3, 4, 5] and history[1]["throughput/seconds_per_step"] == 0.5
    assert "report" in {name.partition("/")[0] for name in history[-1]} and summary["test/ensemble/accuracy"] == 0.75
    assert codes == [1, 0] and artifacts == [("run", "tiny-files")]
    assert "Weights & Biases is offline: `wandb sync" in capsys.readouterr().out


def test_records_that_are_written_otherwise_reach_wandb_once(finished, offline, tmp_path):
    """This happens when log.every_steps is changed: W&B keeps its steps, and gets the steps that follow."""
    directory = a_run(tmp_path / "tiny", "tracking=wandb")
    assert mirror_of(directory, "wandb").finish()
    rewritten(directory, (2, 4, 6, 8))
    assert mirror_of(directory, "wandb").finish()
    assert [step for step, _ in losses(directory)] == [1, 2, 3, 4, 6, 8]


@pytest.fixture
def online(offline, monkeypatch):
    """A server that answers the client of W&B, which has an API key."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.uri)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.delenv("WANDB_MODE")
    yield server
    server.shutdown()
    server.server_close()


def test_with_an_api_key_records_go_to_the_server(finished, online, tmp_path, capsys):
    directory = a_run(tmp_path / "tiny", "tracking=wandb")
    assert mirror_of(directory, "wandb").finish()
    record(directory, (4, 5))
    assert mirror_of(directory, "wandb").finish()
    assert [(row["_step"], row[LOSS]) for row in online.history] == [(step, 1 / step) for step in range(1, 6)]
    resumed = [variables["name"] for name, variables in online.asked if name == "RunResumeStatus"]
    assert resumed == [json.loads(Run(directory).mirror_file("wandb").read_text())["run_id"]]
    told = capsys.readouterr()
    assert online.codes == [1, 1] and (told.out, told.err) == ("", "")


def test_a_server_of_wandb_that_dies_leaves_files_to_sync(finished, online, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mirror, "PATIENCE", 2)
    monkeypatch.setattr(wandb, "PATIENCE", 2)
    directory = a_run(tmp_path / "tiny", "tracking=wandb")
    sender = mirror_of(directory, "wandb")
    sender.begin()
    online.shutdown()
    online.server_close()
    assert not sender.finish()
    assert "does not answer" in capsys.readouterr().err
    (folder,) = directory.glob("wandb/run-*")
    assert sender.destination.remedy == f"wandb sync {folder}" and [*folder.glob("*.wandb")]


def test_a_server_of_wandb_that_is_gone_is_one_line(finished, online, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(mirror, "PATIENCE", 1)
    monkeypatch.setattr(wandb, "INIT_TIMEOUT", 2)
    directory = a_run(tmp_path / "tiny", "tracking=wandb")
    with pytest.raises(ValueError, match="Weights & Biases has not received all of .*tiny; `.* tracking=wandb` sends"):
        command.run([str(directory), "tracking=wandb"])
    told = capsys.readouterr()
    assert told.err.count("Weights & Biases at http://127.0.0.1") == 1 and "does not answer" in told.err


def test_nothing_is_written_through_a_link(finished, offline, tmp_path, capsys):
    directory = a_run(tmp_path / "tiny")
    (directory / "wandb").symlink_to(tmp_path / "elsewhere")
    assert not mirror_of(directory, "wandb").finish()
    assert "wandb is a link" in capsys.readouterr().err and not (tmp_path / "elsewhere").exists()


def test_each_tracker_has_its_own_process(tmp_path, monkeypatch):
    """A tracker that does not answer delays no other."""
    started = []

    def start(run, config, name):
        started.append(name)
        code = {"mlflow": "import time; time.sleep(600)", "tensorboard": ""}[name]
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    monkeypatch.setattr(tracker, "start_mirror", start)
    monkeypatch.setattr(tracker, "MIRROR_LIMIT", 1.0)
    config = compose_config(["data=shapes", "tracking=[mlflow,tensorboard]"])
    tracking = tracker.Tracker(Run(a_run(tmp_path / "tiny")), 1, 1, None, config)
    tracking.open()
    assert tracking.close(finished=True) == ["mlflow"] and started == ["mlflow", "tensorboard"]


def test_without_mlflow_the_default_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dicedist.config.extras.find_spec", lambda name: None)
    tracking = tracker.Tracker(Run(a_run(tmp_path / "tiny")), 1, 1, None, compose_config(["data=shapes"]))
    tracking.open()
    assert tracking.close(finished=True) == []
    told = capsys.readouterr().out
    assert told == "records stay in the run's folder: MLflow is not installed (pip install 'dicedist[mlflow]')\n"


def test_what_mirror_sends_to(tmp_path):
    with pytest.raises(ValueError, match="tracking=wand: write one of mlflow, tensorboard, wandb"):
        command.run([str(tmp_path), "tracking=wand"])
