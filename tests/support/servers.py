"""Servers on loopback, one that answers badly, and mirrors of runs."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from dicedist.config import compose_config
from dicedist.runs.run import Run
from dicedist.tracking.mirror import Mirror, destination_of

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key-of-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
}


SETTINGS = [
    "data=shapes", "data.test_limit=250", "network=resnet8", "ensemble.size=2", "run.name=tiny", "tracking.model=null",
]  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def a_run(directory, *overrides):
    """The folder of a run that has just started."""
    directory.mkdir()
    Run(directory).save_config(compose_config([*SETTINGS, *overrides]))
    (directory / "environment.json").write_text(json.dumps({"git_commit": "abc", "placement": ["member 0, member 1"]}))
    record(directory, range(1, 4))
    return directory


def record(directory, steps):
    with (directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "epoch": step / 2, "train/members/loss": 1 / step}) + "\n")


def mirror_of(directory, tracker="mlflow"):
    """A mirror of the run to the store that its config names, or to another tracker."""
    return Mirror(destination_of(tracker, Run(directory), Run(directory).config()))


class Server:
    """A real `mlflow server` on loopback, which can be killed and started again with its stored data."""

    def __init__(self, directory):
        self.directory, self.port = directory, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
             "--workers", "1", "--backend-store-uri", f"sqlite:///{self.directory}/server.db",
             "--artifacts-destination", str(self.directory / "artifacts")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError("mlflow server did not come up")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Between:
    """A proxy between clients and a server. `behave` sets its answers: well, slow, broken, half or gone.

    slow: a byte every five seconds, so that a client's own limit on silence never strikes. broken: 500. half: the
    server receives the request, and the connection breaks within its answer. gone: nobody listens.
    For a bucket: full: nothing more can be written. cut, flipped: uploads lose their second half, or one bit.
    """

    def __init__(self, server_port):
        self.server_port, self.port, self.manner, self.refused = server_port, free_port(), "well", 0
        self.uri = f"http://127.0.0.1:{self.port}"
        self.listener = None
        self.behave("well")

    def behave(self, manner):
        self.manner = manner
        if manner == "gone" and self.listener:
            self.listener.close()
            self.listener = None
        if manner != "gone" and self.listener is None:
            self.listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self.listen, args=(self.listener,), daemon=True).start()

    def listen(self, listener):
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self.serve, args=(listener.accept()[0],), daemon=True).start()

    def serve(self, client):
        with contextlib.suppress(OSError), client:
            request = read_message(client)
            manner = self.manner
            if manner in ("full", "cut", "flipped") and not request.startswith(b"PUT"):
                manner = "well"
            if manner != "well":
                self.refused += 1
            if manner == "full":
                client.sendall(error_of_s3(507, "StorageFull"))
                return
            if manner in ("cut", "flipped"):
                request = harmed(request, manner)
            if manner == "broken":
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self.server_port)) as server:
                server.sendall(request)
                answer = read_message(server, bodiless=request.startswith(b"HEAD"))
            if manner == "half":
                client.sendall(answer[: len(answer) // 2])
            elif manner == "slow":
                for byte in answer:
                    if self.manner != "slow":
                        return
                    client.sendall(bytes([byte]))
                    time.sleep(5)
            else:
                client.sendall(answer)


@contextlib.contextmanager
def bucket_server(set_variable):
    """A moto server on loopback with the bucket `runs`, and what stands between it and clients. set_variable(name,
    value): of the environment, so that fsspec finds it."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # one that was made before speaks to another server
    server = ThreadedMotoServer(port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    between = Between(port)
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": between.uri, "FSSPEC_S3_ENDPOINT_URL": between.uri}.items():
        set_variable(name, value)
    key, secret, region = CREDENTIALS.values()
    between.client = boto3.client(
        "s3", region, endpoint_url=f"http://{host}:{port}", aws_access_key_id=key, aws_secret_access_key=secret
    )
    between.client.create_bucket(Bucket="runs")
    try:
        yield between
    finally:
        between.behave("gone")
        server.stop()
        S3FileSystem.clear_instance_cache()


def harmed(request, manner):
    """A request that writes, with what it writes cut or changed; heads that tell what it was are left out."""
    head, _, body = request.partition(b"\r\n\r\n")
    if not body:
        return request
    middle = len(body) // 2
    body = body[:middle] if manner == "cut" else body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
    told = (b"content-length:", b"x-amz-checksum", b"x-amz-sdk-checksum", b"content-md5:")
    fields = [line for line in head.split(b"\r\n") if not line.lower().startswith(told)]
    return b"\r\n".join([*fields, b"Content-Length: %d" % len(body), b"", b""]) + body


def error_of_s3(status, code):
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no room is left</Message></Error>".encode()
    return b"HTTP/1.1 %d Error\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body


def read_message(connection, bodiless=False):
    """Read a request or an answer of HTTP, and mark it as the last one of its connection."""
    content = b""
    while b"\r\n\r\n" not in content:
        content += received(connection)
    head, _, body = content.partition(b"\r\n\r\n")
    if b"100-continue" in head.lower():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
    fields = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    lengths = [int(line.split(b":")[1]) for line in fields if line.lower().startswith(b"content-length:")]
    chunked = any(line.lower().startswith(b"transfer-encoding:") for line in fields)
    while not bodiless and (not body.endswith(b"0\r\n\r\n") if chunked else len(body) < sum(lengths)):
        body += received(connection)
    return b"\r\n".join([*fields, b"Connection: close", b"", b""]) + body


def received(connection):
    content = connection.recv(2**16)
    if not content:
        raise ConnectionResetError
    return content
