"""Ensembles on a hub: a folder, and a server that answers as the Hub does. The real Hub is not part of the tests."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from torch import nn

from dicedist import Ensemble, Run
from tests.support.own import Squares

huggingface_hub = pytest.importorskip("huggingface_hub", reason="pip install 'dicedist[hub]'")

NAME = "somebody/squares"
TEST = Squares(60, 2)
IMAGES = torch.from_numpy(TEST.images[:5])


def network():
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3, 3))


def ensemble_of(classes):
    torch.manual_seed(0)
    return Ensemble.from_members([network() for _ in range(3)], classes, size=16)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "squares"
    ensemble = ensemble_of(["a|b", "<i>", "c"]).calibrate(Squares(60, 1), alpha=0.2)
    found = ensemble.evaluate(TEST, ood={"noise": torch.rand(20, 16, 16, 3).mul(255).byte().numpy()}, output=folder)
    return ensemble, Run.open(folder), found


class Hub(BaseHTTPRequestHandler):
    """The requests of create_repo, upload_folder and hf_hub_download, kept and answered in memory."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append(self.path)
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.url}/{NAME}", "id": NAME})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            regular = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer({"files": regular})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{self.server.url}/{NAME}/commit/{'0' * 40}", "commitOid": "0" * 40})
        return self.answer({"errors": [], "warnings": []})  # of the card's metadata

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        content = self.server.files.get(self.path.partition("/resolve/main/")[2])
        if not self.path.startswith(f"/{NAME}/") or content is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self.answer(content, 200, {"ETag": '"1"', "X-Repo-Commit": "0" * 40})

    def answer(self, content, status=200, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        sent = {"Content-Length": len(content), "Content-Type": "application/json", **dict(headers)}
        for name, value in sent.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.url = {}, [], f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def test_pushed_and_pulled(evaluated, hub):
    ensemble, run, found = evaluated
    url = ensemble.push_to_hub(NAME, run, model=network, license="mit", token="hf_right")
    assert url == f"{hub.url}/{NAME}/commit/{'0' * 40}"
    figures = {f"figures/{name}.svg" for name in run.figures()}
    assert set(hub.files) == {"model.safetensors", "README.md", *figures} and len(figures) > 3
    with pytest.raises(ValueError, match="network._target_=tests.step.test_hub.network runs its code"):
        Ensemble.from_pretrained(NAME, token="hf_right")
    for settings in ({"model": network}, {"trusted": True}):
        pulled = Ensemble.from_pretrained(NAME, token="hf_right", **settings)
        assert torch.equal(pulled.predict(IMAGES).probabilities, ensemble.predict(IMAGES).probabilities)
        assert pulled.about.calibration == ensemble.about.calibration
    card = huggingface_hub.ModelCard(hub.files["README.md"].decode())
    assert card.data.license == "mit" and card.data.library_name == "dicedist"
    assert {one.metric_type: one.metric_value for one in card.data.eval_results}["nll"] == found["ensemble"]["nll"]


def test_the_card_tells_what_was_measured(evaluated, hub):
    ensemble, run, found = evaluated
    ensemble.push_to_hub(NAME, run, model=network, token="hf_right")
    text = hub.files["README.md"].decode()
    (accuracy,) = [line for line in text.splitlines() if line.startswith("| accuracy")]
    value, interval = accuracy.split(" | ")[1:]
    lower, upper = interval.removesuffix(" |").split(" to ")
    assert value == f"{100 * found['ensemble']['accuracy']:.2f}" and float(lower) < float(value) < float(upper)
    for words in ("On 60 test inputs", "## Calibration", "60 validation inputs", "## Limits", "| noise |"):
        assert words in text, words
    assert "a&#124;b, &#60;i&#62;, c" in text and "<i>" not in text
    assert all(f"({name})" in text for name in hub.files if name.endswith(".svg"))
    assert 'Ensemble.from_pretrained("somebody/squares", trusted=True)' in text


def test_a_folder_does_as_well(tmp_path, hub):
    plain = ensemble_of(Squares.classes)
    plain.push_to_hub(NAME, model=network, token="hf_right")
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    assert set(hub.files) == {"model.safetensors", "README.md"}  # without an evaluation there are no figures
    assert "Nothing was calibrated" in (tmp_path / "README.md").read_text()
    loaded = Ensemble.from_pretrained(tmp_path, model=network)
    assert torch.equal(loaded.predict(IMAGES).probabilities, plain.predict(IMAGES).probabilities)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ensemble_of(3).push_to_hub(NAME, model=network, token="hf_wrong"), f"{NAME} was not pushed: .*401"),
        (lambda: ensemble_of(3).push_to_hub(NAME), r"write save\(path, model=make_network\)"),
        (lambda: Ensemble.from_pretrained("somebody/nothing"), "somebody/nothing is neither a folder nor on the hub"),
        (lambda: Ensemble.from_pretrained("a b"), "a b is neither a folder nor on the hub"),
    ],
)
def test_what_fails_is_one_line(call, words, hub):
    with pytest.raises(ValueError, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
