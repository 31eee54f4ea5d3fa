"""Every file that we read, damaged at random: one line or a value, never a traceback, a hang or a write elsewhere."""

import io
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dicedist.data.ood import read_array
from dicedist.data.prepared import verified
from dicedist.data.sets.folder import decode_file
from dicedist.evaluation.ensemble import load_ensemble
from dicedist.evaluation.saved import read_logits
from dicedist.reporting.records import read_run
from dicedist.runs.run import Run
from dicedist.tracking.mlflow.store import read_json
from tests.support.tiny import train

PIECES = [
    b"",
    b"\0",
    b"{",
    b"}",
    b"[" * 5000,
    b"\xff\xfe",
    b"NaN",
    b"1e999",
    b"-1",
    b"&a *a",
    b"!!python/object",
    b"\n" * 99,
]
SECONDS = 10  # that a reader may take


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A folder with one of each, and for each the function that reads it."""
    folder = tmp_path_factory.mktemp("fuzz")
    train(folder, "max_steps=2", "data.split=full")
    run = Run(folder / "tiny")
    run.write_result({"step": 2, "ensemble": {"accuracy": 0.5}, "member_ids": [0, 1]})
    prepared = folder / "prepared"
    prepared.mkdir()
    np.save(prepared / "train_labels.npy", np.arange(100))
    about = {"class_names": ["a"], "digest": "0", "blocks": {"train_labels": ["0" * 32]}}
    (prepared / "about.json").write_text(json.dumps(about))
    np.savez(folder / "images.npz", images=np.zeros((2, 8, 8, 3), np.uint8))
    np.save(folder / "images.npy", np.zeros((2, 8, 8, 3), np.uint8))
    np.savez(folder / "logits.npz", logits=np.zeros((2, 3, 4), np.float32), labels=np.zeros(3, np.int64))
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".gif", "GIF"), (".webp", "WEBP"), (".tiff", "TIFF")):
        content = io.BytesIO()
        Image.new("RGB", (40, 30), (9, 99, 199)).save(content, kind)
        (folder / f"photo{suffix}").write_bytes(content.getvalue())
    return folder


def readers(folder):
    run = Run(folder / "tiny")
    (checkpoint,) = run.checkpoints.iterdir()
    use = lambda: load_ensemble(run, tell=lambda text: None)  # noqa: E731
    return {
        run.config_file: use,
        checkpoint / "manifest.json": use,
        checkpoint / "member-0.safetensors": use,
        checkpoint / "discriminator.safetensors": use,
        run.result_file: lambda: read_run(run),
        run.records_file: lambda: read_run(run),
        run.mirror_file: lambda: read_json(run.mirror_file),
        folder / "prepared" / "about.json": lambda: verified(folder / "prepared"),
        folder / "prepared" / "train_labels.npy": lambda: verified(folder / "prepared"),
        folder / "images.npz": lambda: read_array(folder / "images.npz"),
        folder / "images.npy": lambda: read_array(folder / "images.npy"),
        folder / "logits.npz": lambda: read_logits(folder / "logits.npz"),
        **{path: lambda path=path: decode_file(path, 32) for path in folder.glob("photo.*")},
    }


def damaged(content, draws):
    content = bytearray(content)
    for _ in range(draws.randint(1, 4)):
        place = draws.randrange(len(content) + 1)
        match draws.randrange(4):
            case 0:
                del content[place : place + draws.choice([1, 10, 1000, 10**7])]
            case 1:
                content[place:place] = draws.choice(PIECES)
            case 2 if place < len(content):
                content[place] ^= 1 << draws.randrange(8)
            case 3:
                content[place : place + 8] = draws.randbytes(8)
    return bytes(content)


def too_slow(number, frame):
    raise TimeoutError(f"took more than {SECONDS} s")


def fuzz(pristine, folder, seconds, seed):
    draws, deadline, cases = random.Random(seed), time.monotonic() + seconds, 0
    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        while time.monotonic() < deadline:
            work = shutil.copytree(pristine, folder / "work")
            path, read = draws.choice(sorted(readers(work).items(), key=lambda item: str(item[0])))
            content = damaged(path.read_bytes() if path.exists() else b"{}", draws)
            path.write_bytes(content)
            signal.alarm(SECONDS)
            try:
                read()
            except ValueError as error:
                assert "\n" not in str(error), (path.name, content[:200])
            except Exception as error:
                shutil.copy(path, folder / path.name)
                raise AssertionError(f"{path.name}: {type(error).__name__}: {error} ({folder / path.name})") from error
            finally:
                signal.alarm(0)
            shutil.rmtree(work)
            assert sorted(os.listdir(folder)) == [], "something was written elsewhere"
            cases += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    return cases


def test_damaged_files(pristine, tmp_path):
    assert fuzz(pristine, tmp_path, 10, seed=7) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_files_for_ten_minutes(pristine, tmp_path):
    assert fuzz(pristine, tmp_path, 600, seed=Path(tmp_path).name) > 1000
