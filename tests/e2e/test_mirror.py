"""MLflow gets what the run's folder holds: once, in order, however often training or the server is interrupted."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from mlflow import MlflowClient

from dicedist import mirror as command
from dicedist.config import compose_config
from dicedist.runs.lock import locked
from dicedist.runs.run import Run
from dicedist.tracking import mirror, tracker
from dicedist.tracking.mlflow.store import without_password
from dicedist.tracking.mlflow.study import parent_of
from tests.support.servers import SETTINGS, Server, a_run, mirror_of, record


def received(client, directory, name="train/members/loss"):
    run_id = json.loads((directory / "mirror.json").read_text())["run_id"]
    return client.get_run(run_id), [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def follower(directory, **streams):
    uri = Run(directory).config().tracking.uri
    words = [sys.executable, "-m", "dicedist.mirror", str(directory), f"tracking.uri={uri}", "--follow"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, text=True, **streams)


def follow(directory, stopped=False):
    """Mirrors a training that was asked to stop, or that was killed."""
    if stopped:
        Run(directory).stopped_file.touch()
    process = follower(directory)
    process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.fixture
def finished(monkeypatch):
    """Runs whose last checkpoint and results are whole, without making any."""
    monkeypatch.setattr(Run, "ending", lambda self: "FINISHED" if self.result() else "FAILED")


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """The file of an empty sqlite store, whose tables take seconds to make."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def store(empty, tmp_path_factory):
    """A sqlite store that tests share."""
    uri = f"sqlite:///{shutil.copy(empty, tmp_path_factory.mktemp('store'))}"
    return uri, MlflowClient(uri)


def test_a_run_is_killed_resumed_and_finished_as_one(store, tmp_path):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}", "tracking.experiment=resumed")
    follow(directory)
    run, losses = received(client, directory)
    assert (run.info.status, run.info.run_name) == ("FAILED", "tiny")
    assert losses == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert run.data.params["batch_size"] == "128" and run.data.params["method.name"] == "dice"
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    assert "member 0" in run.data.tags["dicedist.placement"]

    # The run goes back to a checkpoint after step 2, repeats step 3 and continues.
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:2]))
    record(directory, range(3, 6))
    follow(directory, stopped=True)
    again, losses = received(client, directory)
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "KILLED")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]

    result = {"ensemble": {"accuracy": 0.75}, "class_names": ["a"], "redundancy": None, "average": "logits"}
    (directory / "evaluation.json").write_text(json.dumps(result))
    follow(directory, stopped=True)
    assert "test/ensemble/accuracy" not in received(client, directory)[0].data.metrics


@pytest.mark.timeout(300)
def test_training_that_is_asked_to_stop_is_marked_as_killed(store, tmp_path):
    uri, client = store
    settings = [*SETTINGS, "data.train_limit=96", "batch_size=16", "epochs=1000", f"run.dir={tmp_path}"]
    training = subprocess.Popen(
        [sys.executable, "-m", "dicedist.train", *settings, f"tracking.uri={uri}", "tracking.experiment=stopped"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for line in training.stdout:
        if line.startswith("step "):
            training.send_signal(signal.SIGTERM)
            break
    training.stdout.read()
    assert training.wait(120) == 75
    directory = tmp_path / "tiny"
    deadline = time.monotonic() + 120
    while (status := received(client, directory)[0].info.status) == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert status == "KILLED"


@pytest.mark.timeout(300)
def test_a_finished_training_says_that_its_mirror_was_killed(store, tmp_path):
    uri, client = store
    settings = [*SETTINGS, "data.train_limit=32", "batch_size=16", "max_steps=2", "log.every_steps=2"]
    training = subprocess.Popen(
        [sys.executable, "-m", "dicedist.train", *settings, f"run.dir={tmp_path}", f"tracking.uri={uri}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    mirrors = []
    while not mirrors and training.poll() is None:
        with suppress(psutil.NoSuchProcess):  # it has children that live for a moment
            mirrors = [one for one in psutil.Process(training.pid).children() if "dicedist.mirror" in one.cmdline()]
        time.sleep(0.05)
    mirrors[0].kill()
    told = training.communicate(timeout=240)[1]
    directory = tmp_path / "tiny"
    assert training.returncode == 76, told
    advice = f"`python -m dicedist.mirror {directory}` sends it\n"
    assert told.endswith(f"dicedist: {directory} is complete, but MLflow has not received all of it; {advice}")
    command.run([str(directory), f"tracking.uri={uri}"])
    run, losses = received(client, directory)
    assert run.info.status == "FINISHED" and [step for step, _ in losses] == [2]


@pytest.mark.timeout(300)
def test_trainings_that_start_at_once_share_a_new_store(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    directories = [a_run(tmp_path / name, f"tracking.uri={uri}", "tracking.experiment=both") for name in ("a", "b")]
    for directory in directories:
        Run(directory).stopped_file.touch()
    processes = [follower(directory, stderr=subprocess.PIPE) for directory in directories]
    told = [process.communicate(timeout=250)[1] for process in processes]
    assert told == ["", ""]
    for directory in directories:
        run, losses = received(MlflowClient(uri), directory)
        assert run.info.status == "KILLED" and len(losses) == 3


def test_a_half_written_line_waits(store, tmp_path):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    sender = mirror_of(directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/mem')
    sender.send_records()
    assert [step for step, _ in received(client, directory)[1]] == [1, 2, 3]


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_misses_nothing(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mirror, "PATIENCE", 1)
    monkeypatch.setattr(mirror, "INTERVAL", 0.2)
    server = Server(tmp_path)
    directory = a_run(tmp_path / "tiny", f"tracking.uri={server.uri}")
    told = "MLflow has not received all of .*tiny; `python -m dicedist.mirror .*tiny tracking.uri=.*` sends the rest"
    with pytest.raises(ValueError, match=told):
        command.run([str(directory), f"tracking.uri={server.uri}"])
    assert capsys.readouterr().err.count("records wait in") == 1  # one line, not one per attempt

    server.start()
    try:
        command.run([str(directory), f"tracking.uri={server.uri}"])
        record(directory, range(4, 6))
    finally:
        server.kill()
    sender = mirror_of(directory)
    assert not sender.attempt(sender.send_records)
    server.start()
    try:
        assert sender.attempt(sender.send_records)
        (directory / "evaluation.json").write_text(json.dumps({"ensemble": {"accuracy": 0.75}, "ood": {}}))
        assert sender.attempt(sender.send_result)
        assert sender.attempt(sender.send_status)
        run, losses = received(MlflowClient(server.uri), directory)
        assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
        assert run.info.status == "FINISHED" and run.data.metrics["test/ensemble/accuracy"] == 0.75
    finally:
        server.kill()


def test_records_whose_receipt_was_lost_are_not_sent_twice(store, tmp_path, monkeypatch):
    """The answer did not come, or the mirror was killed before it noted it."""
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    sender = mirror_of(directory)
    sender.begin()
    client_of = sender.destination.client
    send = client_of.log_batch

    def send_and_break(*arguments, **named):
        send(*arguments, **named)
        raise ConnectionResetError("in the middle of the answer")

    monkeypatch.setattr(client_of, "log_batch", send_and_break)
    assert not sender.attempt(sender.send_records)
    monkeypatch.undo()
    assert mirror_of(directory).attempt(sender.send_records)
    record(directory, range(4, 6))
    monkeypatch.setattr(sender.state, "keep", lambda **changes: client_of.killed)
    with pytest.raises(AttributeError):
        sender.send_records()
    monkeypatch.undo()
    mirror_of(directory).send_records()
    assert [step for step, _ in received(client, directory)[1]] == [1, 2, 3, 4, 5]


def test_records_that_are_written_otherwise_after_a_crash_all_arrive(store, tmp_path):
    """This happens when log.every_steps is changed: the same number of lines, but of other steps."""
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    mirror_of(directory).send_records()
    (directory / "metrics.jsonl").unlink()
    record(directory, (2, 4, 6, 8))
    mirror_of(directory).send_records()
    assert [step for step, _ in received(client, directory)[1]] == [1, 2, 3, 4, 6, 8]


def test_a_finished_training_does_not_wait_without_end(tmp_path, monkeypatch):
    """A server that sends a byte every few seconds would hold it for ever."""
    endless = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE)
    monkeypatch.setattr(tracker, "start_mirror", lambda run, config, name: endless)
    monkeypatch.setattr(tracker, "MIRROR_LIMIT", 0.1)
    tracking = tracker.Tracker(Run(a_run(tmp_path / "tiny")), 1, 1, None, compose_config(SETTINGS))
    tracking.open()
    assert tracking.close(finished=True) == ["mlflow"]
    assert endless.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    "harm", [lambda text: text[:50], lambda text: text.replace('"metrics.jsonl": 3', '"metrics.jsonl": 2')]
)
def test_a_damaged_state_is_not_believed(store, tmp_path, harm):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    mirror_of(directory).send_records()
    state, first = Run(directory).mirror_file("mlflow"), received(client, directory)[0]
    state.write_text(harm(state.read_text()))
    mirror_of(directory).send_records()
    again, losses = received(client, directory)
    assert again.info.run_id != first.info.run_id and [step for step, _ in losses] == [1, 2, 3]


def test_a_server_that_refuses_is_one_line_and_no_waiting(store, tmp_path, capsys):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}", "tracking.experiment=refused")
    mirror_of(directory).begin()
    client.delete_experiment(client.get_experiment_by_name("refused").experiment_id)
    other = a_run(tmp_path / "other", f"tracking.uri={uri}", "tracking.experiment=refused")
    with pytest.raises(ValueError, match="MLflow has not received all of"):
        command.run([str(other), f"tracking.uri={uri}"])
    told = capsys.readouterr().err
    assert told.count("refuses to begin") == 1 and "deleted" in told


def test_a_full_database_is_one_line(empty, tmp_path):
    """In a process of its own, as MLflow sets up its loggers when it is imported."""
    uri, full = f"sqlite:///{shutil.copy(empty, tmp_path)}", (empty.stat().st_size,) * 2
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, full)  # noqa: E731
    sender = follower(directory, stderr=subprocess.PIPE, preexec_fn=limit)
    first = sender.stderr.readline()
    time.sleep(3 * mirror.INTERVAL)
    sender.kill()
    assert "does not answer, records wait in" in first and sender.communicate()[1] == ""


def test_no_room_for_files_loses_nothing(finished, store, tmp_path, capsys, monkeypatch):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    (directory / "evaluation.json").write_text(json.dumps({"ensemble": {"accuracy": 0.75}, "ood": {}}))
    sender = mirror_of(directory)

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full.__name__ = "send_files"
    monkeypatch.setattr(sender, "send_files", full)
    assert not sender.finish(), "MLflow lacks the files, and the command says so by its exit code"
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "could not send files (`python -m dicedist.mirror` tries again)" in told
    assert "No space left" in told
    assert received(client, directory)[0].info.status == "FINISHED"
    assert sender.state["sent"].keys() == {"result"}


def test_a_new_evaluation_is_sent_again_and_an_old_one_is_not(finished, store, tmp_path):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    sender = mirror_of(directory)
    for accuracies in ((0.5,), (0.5,), (0.75, 0.5)):
        Run(directory).write_result({"ensemble": {"accuracy": accuracies[0]}, "ood": {}})
        Run(directory).report_file.write_text("<html></html>")
        assert sender.finish()
        history = received(client, directory, "test/ensemble/accuracy")[1]
        assert sorted({value for _, value in history}) == sorted(accuracies)


def test_what_a_run_is_told_of_itself(store, tmp_path):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    mirror_of(directory).begin()
    run = received(client, directory)[0]
    assert run.data.params["redundancy.delta.resolved"] == "0.1" and run.data.params["redundancy.delta"] == "auto"
    assert run.data.tags["dicedist.members"] == "2" and run.data.tags["mlflow.user"]
    assert f"runs/{run.info.run_id}/artifacts/report.html" in run.data.tags["mlflow.note.content"]
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.tags[0].value) == ("shapes", "training")


def test_a_run_whose_begin_broke_off_is_described_all_the_same(store, tmp_path, monkeypatch):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    sender = mirror_of(directory)
    client_of = sender.destination.client

    def broken(*arguments, **named):
        raise ConnectionResetError("in the middle of it")

    monkeypatch.setattr(client_of, "log_inputs", broken)
    assert not sender.attempt(sender.begin)
    monkeypatch.undo()
    assert mirror_of(directory).attempt(sender.begin)
    run = received(client, directory)[0]
    assert run.data.params["batch_size"] == "128" and run.inputs.dataset_inputs


def test_runs_of_a_study_are_nested_under_one(store, tmp_path):
    uri, client = store
    settings = [f"tracking.uri={uri}", "tracking.experiment=many", "tracking.study=a 'sweep'"]
    parents = set()
    for name in ("a", "b"):
        directory = a_run(tmp_path / name, *settings)
        mirror_of(directory).begin()
        parents.add(received(client, directory)[0].data.tags["mlflow.parentRunId"])
    (parent,) = map(client.get_run, parents)
    assert parent.info.run_name == "a 'sweep'" and parent.info.status == "FINISHED"

    # Another mirror created a parent at the same time, a moment earlier: this one takes it and removes its own.
    experiment = client.get_experiment_by_name("many").experiment_id
    first = client.create_run(experiment, start_time=1, tags={"dicedist.study": "twice"}).info.run_id

    class Late(MlflowClient):
        searched = 0

        def search_runs(self, *words):
            self.searched += 1
            return [] if self.searched == 1 else super().search_runs(*words)

    assert parent_of(Late(uri), experiment, "twice") == first
    assert len(client.search_runs([experiment], "tags.`dicedist.study` = 'twice'")) == 1


def test_redundancy_in_nats_and_the_schedules_reach_mlflow(store, tmp_path):
    uri, client = store
    directory = a_run(tmp_path / "tiny", f"tracking.uri={uri}")
    with Run(directory).records_file.open("a") as file:
        values = {"train/redundancy_nats": 0.7, "schedule/learning_rate": 0.1, "schedule/delta": 0.1}
        file.write(json.dumps({"step": 4, "epoch": 2.0, **values}) + "\n")
    fresh = {"pairs": [[0, 1], [0, 2]], "conditional": {"nats_P": [0.25, 0.75]}}
    Run(directory).write_result({"redundancy": {"nats_P": [1.0, 2.0]}, "redundancy_fresh": fresh})
    sent = mirror_of(directory)
    for task in (sent.begin, sent.send_records, sent.send_result):
        task()
    found = received(client, directory)[0].data.metrics
    assert values.items() <= found.items()
    assert found["test/redundancy/nats"] == 1.5 and found["test/redundancy_fresh/conditional/nats"] == 0.5


def test_a_run_is_not_sent_to_a_second_store_unasked(tmp_path, monkeypatch):
    """Nor does anything in its folder decide whom we call."""
    directory = a_run(tmp_path / "tiny", "tracking.uri=http://127.0.0.1:9")
    Run(directory).mirror_file("mlflow").write_text(
        json.dumps({"uri": "sqlite:////elsewhere/mlflow.db", "run_id": "1"})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(
        ValueError, match="were sent to sqlite:////elsewhere/mlflow.db, .* tracking.uri=.* makes a copy"
    ):
        command.run([str(directory)])
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("words", [[], ["a", "b"], ["tracking.uri=x"]])
def test_without_a_run_it_says_what_to_write(words):
    with pytest.raises(ValueError, match="name one run to send"):
        command.run(words)


def test_passwords_are_not_shown():
    assert without_password("https://me:secret@host:5000/path") == "https://host:5000/path"
    assert without_password("sqlite:///mlflow.db") == "sqlite:///mlflow.db"
    with pytest.raises(ValueError, match="tracking.uri holds a password.*MLFLOW_TRACKING_PASSWORD"):
        compose_config(["tracking.uri=https://me:secret@host"])


def test_two_do_not_send_at_once(tmp_path):
    directory = a_run(tmp_path / "tiny")
    with locked(Run(directory).mirror_lock_file("mlflow")), pytest.raises(ValueError, match="are being sent already"):
        command.run([str(directory)])


def test_not_a_run(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        command.run([str(tmp_path)])
