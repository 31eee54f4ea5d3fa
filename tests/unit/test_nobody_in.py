"""Folders, images and messages of strangers: no link is followed, no pipe read, no password shown."""

import errno
import fcntl
import io
import os

import pytest
from PIL import Image

from dicedist.config import compose_config
from dicedist.config.compose import parse_config
from dicedist.console.lines import put, redacted
from dicedist.console.tables import table
from dicedist.data.sets.folder import decode_file, find_images, is_unfit
from dicedist.runs.files import open_own, read_plain, replace_text
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
    assert is_unfit(tmp_path / "bomb.png")


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


def test_where_the_file_system_has_no_locks_a_name_serves(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "no locks available")

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
    replace_text(owner, f"process 999999999 on {os.uname().nodename}")  # which has ended
    with run_lock(run):
        assert str(os.getpid()) in owner.read_text()
    replace_text(owner, "process 1 on elsewhere")
    with pytest.raises(ValueError, match="in use by process 1 on elsewhere"), run_lock(run):
        pass
