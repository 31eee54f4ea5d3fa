"""Folders, images and messages of strangers: no link is followed, no pipe read, no password shown."""

import errno
import fcntl
import io
import os
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
from PIL import Image
from torch.distributed import TCPStore

from dicedist.cluster import world
from dicedist.cluster.process import LAUNCHER, SECRET, remark_on_torchrun
from dicedist.config import compose_config
from dicedist.config.compose import parse_config
from dicedist.console.lines import put, redacted
from dicedist.console.tables import table
from dicedist.data.images import decode_file, open_image
from dicedist.data.sets.folder import find_images
from dicedist.reporting.page import as_text
from dicedist.reporting.records import read_run
from dicedist.runs.files import open_own, read_json, read_plain, replace_text
from dicedist.runs.lock import run_lock
from dicedist.runs.run import Run


def test_links_in_a_run_folder_are_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    run = Run(tmp_path / "run")
    run.directory.mkdir()
    for link in (run.result_file, run.lock_file, run.system_file, run.directory / ".evaluation.json.partial"):
        link.symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="is a link, and nothing is written through links"):
        run.write_result({})
    (run.directory / ".evaluation.json.partial").unlink()
    run.write_result({})
    assert not run.result_file.is_symlink()
    with pytest.raises(ValueError, match="is a link"), run_lock(run):
        pass
    with pytest.raises(ValueError, match="is a link"):
        open_own(run.system_file, "a")
    assert (tmp_path / "precious").read_text() == "mine"


def test_pipes_and_giants_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="missing or damaged .*not a plain file"):
        Run(tmp_path).config()
    with pytest.raises(ValueError, match="has 11 bytes, more than the 10"):
        (tmp_path / "large").write_text("hello world")
        read_plain(tmp_path / "large", 10)


def test_no_reader_of_a_run_waits_for_a_pipe(tmp_path):
    run = Run(tmp_path)
    run.save_config(compose_config(["data=shapes", "ensemble.size=2"]))
    for path in (run.gallery_file, run.mirror_file("mlflow"), run.result_file, run.records_file):
        os.mkfifo(path)
    with pytest.raises(ValueError, match="mirror.json is not a plain file"):
        read_json(run.mirror_file("mlflow"))
    assert run.result() is None
    with pytest.raises(ValueError, match="metrics.jsonl is not a plain file"):
        read_run(run)
    run.records_file.unlink()
    with pytest.raises(ValueError, match="evaluation.json is damaged"):
        read_run(run)
    run.result_file.unlink()
    assert read_run(run).gallery == {}


def test_yaml_aliases_are_refused():
    bomb = "a: &a [1, 1]\n" + "\n".join(f"{c}: &{c} [*{p}, *{p}]" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
    with pytest.raises(ValueError, match="config.yaml is missing or damaged"):
        parse_config(bomb, "config.yaml")


@pytest.mark.parametrize("size", [(1, 100_000), (60_000, 2000), (20_000, 20_000)])
def test_an_image_that_would_take_gigabytes_is_not_decoded(tmp_path, size):
    Image.new("1", size).save(tmp_path / "bomb.png")
    assert decode_file(tmp_path / "bomb.png", 32).startswith(f"{size[0]} x {size[1]} pixels: the most are") or (
        "decompression bomb" in decode_file(tmp_path / "bomb.png", 32)
    )
    with pytest.raises((ValueError, Image.DecompressionBombError)):
        open_image(tmp_path / "bomb.png")  # DALI does not see it


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    assert find_images(tmp_path) == []
    assert decode_file(tmp_path / "x.png", 32) == "not a plain file"


@pytest.mark.parametrize("name", ["..", ".", "a/b", " ", "a\nb"])
def test_a_run_stays_in_its_folder(name):
    with pytest.raises(ValueError, match="run.name=.*write a name for a folder"):
        compose_config([f"run.name={name}"])


def test_passwords_are_never_shown():
    stream = io.StringIO()
    put(stream, "no answer from https://me:secret@host:5000/x (http://token@other)")
    assert stream.getvalue() == "no answer from https://***@host:5000/x (http://***@other)"
    assert redacted("me@host and a://b/c@d") == "me@host and a://b/c@d"


def test_names_cannot_command_the_terminal():
    assert "\x1b" not in table(["class"], [["\x1b[31mred"]])


def test_a_closed_stream_is_no_reason_to_end():
    stream = io.StringIO()
    stream.close()
    put(stream, "nobody reads this")


def no_locks(*arguments):
    raise OSError(errno.ENOLCK, "no locks available")


def test_where_the_file_system_has_no_locks_a_name_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    run = Run(tmp_path / "run")
    with run_lock(run):
        with (
            pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*, delete .*.lock.owner"),
            run_lock(run),
        ):
            pass
    owner = run.directory / ".lock.owner"
    assert not owner.exists()
    replace_text(owner, f"999999\n{os.uname().nodename}\n")  # which has ended
    with run_lock(run):
        assert str(os.getpid()) in owner.read_text()
    replace_text(owner, "1\nelsewhere\n")
    with pytest.raises(ValueError, match="in use by process 1 on elsewhere"), run_lock(run):
        pass


HOLDER = """
import errno, fcntl, sys
from dicedist.runs.lock import run_lock
from dicedist.runs.run import Run
def no_locks(*arguments):
    raise OSError(errno.ENOLCK, "no locks available")
if sys.argv[2] == "none":
    fcntl.flock = no_locks
with run_lock(Run(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("locks", ["some", "none"])
def test_a_killed_process_leaves_no_lock(tmp_path, monkeypatch, locks):
    run = Run(tmp_path / "run")
    if locks == "none":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    words = [sys.executable, "-c", HOLDER, str(run), locks]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"is in use by process {holder.pid} on "), run_lock(run):
            pass
        holder.kill()
        holder.wait()
    with run_lock(run):
        pass


@pytest.fixture
def alone_on_a_node(monkeypatch):
    """The environment of the second of two ranks, under plain torchrun."""
    monkeypatch.delenv(LAUNCHER, raising=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("address", "own", "exposed"),
    [
        ("0.0.0.0", ["127.0.0.1", "8.8.4.4"], True),
        ("0.0.0.0", ["fe80::1%eth0", "2001:4860:4860::8888"], True),
        ("0.0.0.0", ["127.0.0.1", "10.0.0.7", "192.168.1.2", "fe80::1%eth0"], False),  # as every torchrun listens
        ("127.0.0.1", ["8.8.4.4"], False),
    ],
)
def test_a_store_that_the_internet_reaches_is_warned_of(alone_on_a_node, capsys, address, own, exposed):
    found = [SimpleNamespace(family=socket.AF_INET6 if ":" in one else socket.AF_INET, address=one) for one in own]
    alone_on_a_node.setattr(world.psutil, "net_if_addrs", lambda: {"eth0": found})
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        alone_on_a_node.setenv("MASTER_PORT", str(port))
        world.warn_of_exposed_store()
        told = capsys.readouterr().err
        assert (f"torchrun's store listens on port {port} of a public address" in told) == exposed
        assert told.count("\n") == exposed and ("start with `dicedist train --nproc 2`" in told) == exposed
        alone_on_a_node.setenv("LOCAL_WORLD_SIZE", "1")  # of several nodes, which need the network
        world.warn_of_exposed_store()
    assert capsys.readouterr().err == ""


def test_a_stopped_run_prepares_for_torchruns_traceback(alone_on_a_node):
    assert remark_on_torchrun(75) == ""  # neither torchrun nor our launcher
    alone_on_a_node.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "`dicedist train --nproc 2` ends without, with 75" in remark_on_torchrun(75)
    assert remark_on_torchrun(2) == ""
    alone_on_a_node.setenv(LAUNCHER, "/tmp/codes")
    assert remark_on_torchrun(75) == ""


def test_who_does_not_know_the_secret_cannot_end_a_run(alone_on_a_node):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone_on_a_node.setenv("MASTER_PORT", str(server.port))
    alone_on_a_node.setenv(SECRET, "of this run")
    for key in ("ended", "attempt-0/ended", "/attempt-0/ended", "another/attempt-0/ended"):
        server.set(key, "2")
    ranks = world.connect(timedelta(seconds=10))
    assert not ranks.check(["ended"])
    assert world.is_first_in_store(75) and ranks.get("ended") == b"75"


IN_ASCII = r"""
import sys
from pathlib import Path
from dicedist.cluster.process import command
from dicedist.runs.files import open_own, read_plain, replace_text
def run(arguments):
    print("caf\u00e9", open(sys.argv[1], "w").encoding)
    replace_text(Path(sys.argv[1]), "caf\u00e9 \u2192")
    with open_own(Path(sys.argv[1]), "a") as file:
        file.write(" na\u00efve")
    raise ValueError("no caf\u00e9")
command(run)
"""


def test_files_are_utf_8_in_any_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", IN_ASCII, tmp_path / "file"]
    done = subprocess.run(words, env={**os.environ, **plain}, capture_output=True, text=True)
    assert done.stdout == "caf\\xe9 ANSI_X3.4-1968\n" and done.stderr == "dicedist: no caf\\xe9\n", done.stderr
    assert done.returncode == 2 and (tmp_path / "file").read_text("utf-8") == "café → naïve"


def test_a_name_that_is_no_text_does_not_end_a_report(tmp_path):
    replace_text(tmp_path / "page.html", as_text("caf\udce9"))
    assert (tmp_path / "page.html").read_text() == "caf?"
