"""The model in MLflow gives the answers that evaluation measured: loaded without pickle, and over HTTP."""

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from PIL import Image
from safetensors.torch import load_file
from torchvision.datasets import CIFAR10

from dicedist import train
from dicedist.data.sets import shapes
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from dicedist.tracking.mlflow import registry
from dicedist.tracking.mlflow.serving import ServedEnsemble
from tests.support.servers import free_port, mirror_of
from tests.support.tiny import TINY

NUM_IMAGES = 16


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A tiny run in an sqlite store, with its model registered: the run's folder and the store."""
    directory = tmp_path_factory.mktemp("logged")
    uri = f"sqlite:///{directory}/mlflow.db"
    settings = [f"tracking.uri={uri}", "tracking.experiment=serving", "tracking.register=tiny", "max_steps=3"]
    train.run([*TINY, f"run.dir={directory}", *settings])
    sender = mirror_of(directory / "tiny")
    assert sender.finish()
    return directory / "tiny", uri


def test_run_and_model_are_complete(logged):
    directory, uri = logged
    client = MlflowClient(uri)
    state = json.loads((directory / "mirror.json").read_text())
    run = client.get_run(state["run_id"])
    assert run.info.status == "FINISHED"
    measured = json.loads((directory / "evaluation.json").read_text())["ensemble"]["accuracy"]
    assert run.data.metrics["test/ensemble/accuracy"] == measured
    files = {file.path for file in client.list_artifacts(state["run_id"])}
    assert {"config.yaml", "environment.json", "evaluation.json", "metrics.jsonl", "report.html", "figures"} <= files
    assert client.get_model_version("tiny", "1").run_id == state["run_id"]
    assert (directory.parent / "mlruns" / "serving").is_dir(), "files are beside the database, wherever it was started"
    assert {"throughput/images_per_second", "train/members/loss", "val/ensemble/accuracy"} <= run.data.metrics.keys()


def test_the_model_has_the_name_the_results_and_the_data_of_its_run(logged):
    directory, uri = logged
    client = MlflowClient(uri)
    state = json.loads((directory / "mirror.json").read_text())
    run = client.get_run(state["run_id"])
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (model.name, model.source_run_id, output.step) == ("tiny", state["run_id"], 3)
    measured = json.loads((directory / "evaluation.json").read_text())["ensemble"]["accuracy"]
    (accuracy,) = [metric for metric in model.metrics if metric.key == "test/ensemble/accuracy"]
    assert (accuracy.value, accuracy.dataset_name) == (measured, "shapes-test")
    assert model.params["method.name"] == "dice"
    data = {one.dataset.name: one.tags[0].value for one in run.inputs.dataset_inputs}
    assert data == {"shapes": "training", "shapes-test": "testing"}
    assert len(client.get_metric_history(state["run_id"], "test/ensemble/accuracy")) == 1, "sent once"
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("[Report](#/experiments/") and f"accuracy of the ensemble {100 * measured:.2f} %" in note
    assert client.get_model_version_by_alias("tiny", "champion").version in (1, "1")


def test_a_finished_run_that_is_started_again_leaves_mlflow_alone(logged, capsys, monkeypatch):
    directory, uri = logged
    before = (directory / "mirror.json").read_text()
    monkeypatch.setattr("dicedist.tracking.tracker.start_mirror", None)
    settings = [setting for setting in TINY if setting != "tracking=none"]
    train.run([*settings, f"run.dir={directory.parent}", "max_steps=3", f"tracking.uri={uri}"])
    assert "is finished, after 3 steps" in capsys.readouterr().out
    assert (directory / "mirror.json").read_text() == before


LOAD = """
import json, sys, mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/tiny/1")
assert "dicedist" not in sys.modules
answers = model.predict(np.load(sys.argv[2]))
print(json.dumps({name: np.asarray(value).tolist() for name, value in answers.items()}))
"""


def expected(directory):
    logits = load_file(directory / "logits.safetensors")["logits"][:, :NUM_IMAGES]
    return logits.mean(0).argmax(1), logits.mean(0).softmax(1)


def check(answers, directory):
    labels, probabilities = expected(directory)
    assert answers["label"] == labels.tolist()
    assert answers["class"] == [shapes.CLASS_NAMES[label] for label in labels]
    torch.testing.assert_close(torch.tensor(answers["probabilities"]), probabilities, atol=1e-5, rtol=1e-4)
    assert {"disagreement", "confidence", "ood_score"} <= answers.keys()


def images(tmp_path):
    path = tmp_path / "images.npy"
    np.save(path, shapes.generate("test")[0][:NUM_IMAGES])
    return path


def test_loads_without_pickle_and_dicedist(logged, tmp_path):
    directory, uri = logged
    environment = {**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    told = subprocess.run(
        [sys.executable, "-c", LOAD, uri, str(images(tmp_path))],
        capture_output=True, text=True, env=environment, cwd=directory.parent, check=True,
    )  # fmt: skip
    check(json.loads(told.stdout.splitlines()[-1]), directory)


@pytest.fixture(scope="module")
def served(logged):
    """Asks a `mlflow models serve` about images: [N, 32, 32, 3] uint8 or base64 text in, answers by name out."""
    directory, uri = logged
    server, port = serve(directory, uri)

    def ask(images):
        body = json.dumps({"inputs": images.tolist() if isinstance(images, np.ndarray) else images}).encode()
        url = f"http://127.0.0.1:{port}/invocations"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        return json.loads(patiently(request))["predictions"]

    yield ask
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.timeout(300)
def test_is_served_over_http(logged, served, tmp_path):
    check(served(np.load(images(tmp_path))), logged[0])


@pytest.mark.timeout(300)
def test_images_that_would_be_answered_wrongly_are_refused_over_http(served, tmp_path):
    photos = np.load(images(tmp_path))
    for wrong, reason in ((photos / 255, "not floats in 0..1"), (photos[:, :16], "shape")):
        with pytest.raises(AssertionError, match=f"400 .*{reason}"):
            served(wrong)


def photo(format, mode="RGB", **options):
    """A file of 48 x 40 pixels."""
    pixels = torch.randint(256, (40, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


@pytest.mark.timeout(300)
def test_files_of_images_are_answered_as_predict_answers_them(logged, served, tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [photo("JPEG", exif=turned), photo("PNG"), photo("PNG", mode="L"), photo("JPEG", mode="CMYK")]
    paths = [tmp_path / f"{number}.img" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    texts = [base64.b64encode(content).decode() for content in files]
    answers = served([f"data:image/jpeg;base64,{texts[0]}", *texts[1:]])
    own = load_ensemble(Run.open(logged[0]), images="uint8").predict(paths)
    assert answers["class"] == list(own.names)
    assert answers["confidence"] == pytest.approx(own.confidence.tolist(), abs=1e-5)
    for wrong in (["no image"], [texts[0][:100]], [base64.b64encode(photo("GIF")).decode()]):
        with pytest.raises(AssertionError, match="400 .*not a JPEG or PNG image as base64 text"):
            served(wrong)


def test_the_served_model_lives_on_the_device_that_is_asked_for(logged, monkeypatch):
    """On `meta`, as there is no GPU here: a tensor that stays behind would make the program fail."""
    directory, uri = logged
    monkeypatch.setenv("MLFLOW_DEFAULT_PREDICTION_DEVICE", "meta")
    model = ServedEnsemble()
    (path,) = (directory.parent / "mlruns").rglob("ensemble.pt2")
    model.load_context(SimpleNamespace(artifacts={"ensemble": str(path)}))
    answers = model.program(torch.zeros(2, 32, 32, 3, dtype=torch.uint8, device=model.device))
    assert {value.device.type for value in answers.values()} == {"meta"}


@pytest.mark.timeout(300)
def test_answers_about_real_images_are_the_networks_own(logged, served, real_data):
    photos = torch.from_numpy(CIFAR10(real_data, train=False).data[:NUM_IMAGES])
    answers, own = served(photos.numpy()), load_ensemble(Run.open(logged[0]), images="uint8")(photos)
    assert answers["label"] == own["label"].tolist()
    for name in ("probabilities", "disagreement", "confidence", "ood_score"):
        torch.testing.assert_close(torch.tensor(answers[name]), own[name], atol=1e-5, rtol=1e-4, check_dtype=False)


def test_a_name_that_is_taken_by_another_model_is_not_touched(logged, tmp_path, monkeypatch, capsys):
    """Otherwise users of the latest version would suddenly have to send other images."""
    directory, uri = logged
    monkeypatch.chdir(directory.parent)
    train.run([*TINY, f"run.dir={tmp_path}", "max_steps=1"])
    config = Run(tmp_path / "tiny").config()
    tracking = replace(config.tracking, uri=uri, register="tiny", model="float")
    Run(tmp_path / "tiny").save_config(replace(config, tracking=tracking))
    sender = mirror_of(tmp_path / "tiny")
    assert sender.finish()
    told = capsys.readouterr().err
    assert "tracking.register=tiny: version 1 of that model has another signature" in told
    assert len(MlflowClient(uri).search_model_versions("name = 'tiny'")) == 1
    assert MlflowClient(uri).get_run(sender.state["run_id"]).outputs.model_outputs  # logged all the same


class Registry:
    """The part of MLflow's client that says who is champion."""

    def __init__(self, reigning=None):
        self.reigning, self.tags = reigning, {}

    def set_model_version_tag(self, name, version, key, value):
        self.tags[key] = value

    def get_model_version_by_alias(self, name, alias):
        if self.reigning is None:
            raise MlflowException("no such alias")
        return SimpleNamespace(version="1", tags=self.reigning)

    def set_registered_model_alias(self, name, alias, version):
        self.reigning = (alias, version)


@pytest.mark.parametrize(
    ("reigning", "wins"),
    [
        (None, True),
        ({registry.NLL: "0.6", registry.DATA: "abc"}, True),
        ({registry.NLL: "0.4", registry.DATA: "abc"}, False),
        ({registry.NLL: "0.6", registry.DATA: "other data"}, False),
        ({}, False),
    ],
)
def test_the_champion_has_the_lowest_validation_nll_on_the_same_data(reigning, wins, tmp_path, capsys):
    lines = [json.dumps({"step": step, "epoch": step, "val/ensemble/nll": nll}) for step, nll in ((1, 0.5), (2, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    client = Registry(reigning)
    registry.crown(client, "shapes", 2, registry.validation_nll(Run(tmp_path), 1), "abc")
    assert client.tags == {registry.NLL: "0.5", registry.DATA: "abc"}
    assert (client.reigning == ("champion", "2")) == wins
    assert ("shapes@champion is still version 1" in capsys.readouterr().out) != wins


def serve(directory, uri):
    """A server that listens, and its port: one that another test took in between is tried no second time."""
    told = directory.parent / "server.log"
    for _ in range(3):
        port = free_port()
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/tiny/1", "--env-manager", "local",
             "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            env={**os.environ, "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
                 "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
            cwd=directory.parent, stdout=subprocess.DEVNULL, stderr=told.open("a"), start_new_session=True,
        )  # fmt: skip
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return server, port
            time.sleep(0.2)
    raise AssertionError(f"the server ended three times before it listened: {told.read_text()[-2000:]}")


def patiently(request):
    deadline = time.monotonic() + 200
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code} {error.read()[-1000:].decode()}") from error
        except OSError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.5)
