"""Shards behind s3:// (a moto server on this machine) and http://: copied once, renewed when replaced, bounded."""

import functools
import http.server
import threading

import numpy as np
import pytest
from PIL import Image

from dicedist.data import __main__ as command
from dicedist.data.prepared import home
from dicedist.data.sources import load

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("ash", "elm"):
            (root / split / name).mkdir(parents=True)
            for place in range(4):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{place}.png")
    command.run(["pack", str(root), str(root / "packed"), "images=5"])
    return root / "packed"


@pytest.fixture
def bucket(shards, monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    pytest.importorskip("s3fs")
    import boto3

    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "FSSPEC_S3_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="images")
    for path in shards.iterdir():
        client.upload_file(str(path), "images", f"set/{path.name}")
    yield client
    server.stop()


def test_s3(bucket, shards, data_config, fresh_home, capsys):
    config = data_config("shards", root="s3://images/set", split="full")
    local, remote = load(data_config("shards", root=str(shards), split="full")), load(config)
    assert remote.train.images_NHWC.equal(local.train.images_NHWC) and remote.class_names == ["ash", "elm"]
    copies = sorted((home() / "shards").rglob("*.tar"))
    times = [path.stat().st_mtime_ns for path in copies]
    assert load(config).data_digest == remote.data_digest
    assert [path.stat().st_mtime_ns for path in copies] == times  # nothing was copied again
    bucket.upload_file(str(shards / "train-000001.tar"), "images", "set/train-000000.tar")
    assert load(config).data_digest != remote.data_digest
    with pytest.raises(ValueError, match=r"more than data.cache_gb=1e-06: raise it"):
        load(data_config("shards", root="s3://images/set", cache_gb=1e-6))
    with pytest.raises(ValueError, match="data.root=s3://elsewhere/set cannot be read: "):
        load(data_config("shards", root="s3://elsewhere/set"))


def test_http(shards, data_config, fresh_home):
    pytest.importorskip("aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=shards)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        remote = load(data_config("shards", root=url, split="full"))
        server.shutdown()
    local = load(data_config("shards", root=str(shards), split="full"))
    assert remote.train.images_NHWC.equal(local.train.images_NHWC)
    with pytest.raises(ValueError, match="cannot be read"):
        load(data_config("shards", root=url, split="full"))
