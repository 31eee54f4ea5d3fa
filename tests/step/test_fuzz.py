"""Every file that we read, damaged at random: one line or a value, never a traceback, a hang or a write elsewhere.

python -m tests.step.test_fuzz SECONDS SEED     as long as you like
"""

import io
import os
import random
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors.numpy import save_file

from dicedist.config import compose_config
from dicedist.data import sources
from dicedist.data.ood import read_array
from dicedist.data.sets.folder import decode_file
from dicedist.data.sets.shards import listed
from dicedist.data.sets.vectors import read_table
from dicedist.evaluation.formats import read_ensemble, write_safetensors
from dicedist.evaluation.loading import load_ensemble
from dicedist.evaluation.logits import read_logits
from dicedist.reporting.page import page
from dicedist.reporting.records import read_groups
from dicedist.runs.run import Run
from dicedist.tracking.state import read_or_nothing
from tests.support.tiny import build

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
SECONDS = 60  # that a reader may take, on a busy machine


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return make(tmp_path_factory.mktemp("fuzz"))


def make(folder):
    """One of each file, from a run that was trained and evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DICEDIST_DATA", str(folder / "home"))
        build(folder, "max_steps=2").train_and_evaluate()
    ensemble = load_ensemble(Run(folder / "tiny"))
    write_safetensors(ensemble, folder / "exported.safetensors", None)
    Run(folder / "tiny").mirror_file("mlflow").write_text('{"uri": "sqlite:///a", "run_id": "1", "received": {"a": 1}}')
    np.savez(folder / "images.npz", images=np.zeros((2, 8, 8, 3), np.uint8))
    np.save(folder / "images.npy", np.zeros((2, 8, 8, 3), np.uint8))
    np.savez(folder / "logits.npz", logits=np.zeros((2, 3, 4), np.float32), labels=np.zeros(3, np.int64))
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".gif", "GIF"), (".webp", "WEBP"), (".tiff", "TIFF")):
        content = io.BytesIO()
        Image.new("RGB", (40, 30), (9, 99, 199)).save(content, kind)
        (folder / f"photo{suffix}").write_bytes(content.getvalue())
    write_tables(folder)
    write_shard(folder / "shard.tar", (folder / "photo.jpg").read_bytes())
    return folder


def write_tables(folder):
    """Vectors with a column of labels, in every form."""
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
    np.savez(folder / "table.npz", x=x, y=y)
    save_file({"x": x, "y": y}, folder / "table.safetensors")
    lines = [f"{a},{b},{c},{label}" for (a, b, c), label in zip(x, ["cat", "dog"] * 2, strict=True)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,label", *lines]))
    parquet.write_table(pa.table({"a": x[:, 0], "label": ["cat", "dog"] * 2}), folder / "table.parquet")


def write_shard(path, image):
    with tarfile.open(path, "w") as tar:
        for name, content in (("0.jpg", image), ("0.cls", b"1"), ("1.jpg", image), ("1.json", b'{"label": 0}')):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def readers(folder):
    """Each file, and the function that reads it."""
    run = Run(folder / "tiny")
    (checkpoint,) = run.checkpoints.iterdir()
    silent = lambda text: None  # noqa: E731
    use = lambda: load_ensemble(run, tell=silent)  # noqa: E731
    report = lambda: page(read_groups([run]))  # noqa: E731
    prepared = lambda: sources.load(compose_config(["data=shapes", "data.train_limit=48"]).data)  # noqa: E731
    return {
        run.config_file: use,
        checkpoint / "manifest.json": use,
        checkpoint / "member-0.safetensors": use,
        checkpoint / "discriminator.safetensors": use,
        run.logits_file: lambda: load_ensemble(run, [0], tell=silent),
        run.result_file: report,
        run.records_file: report,
        run.gallery_file: report,
        run.mirror_file("mlflow"): lambda: read_or_nothing(run.mirror_file("mlflow")),
        run.environment_file: lambda: read_or_nothing(run.environment_file),
        folder / "exported.safetensors": lambda: read_ensemble(folder / "exported.safetensors"),
        **{path: prepared for path in (folder / "home").rglob("*") if path.suffix in (".json", ".npy")},
        folder / "images.npz": lambda: read_array(folder / "images.npz", 3),
        folder / "images.npy": lambda: read_array(folder / "images.npy", 3),
        folder / "logits.npz": lambda: read_logits(folder / "logits.npz"),
        **{path: lambda path=path: decode_file(path, 32) for path in folder.glob("photo.*")},
        **{path: lambda path=path: read_table(path) for path in folder.glob("table.*")},
        folder / "shard.tar": lambda: [*listed([folder / "shard.tar"])],
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


def state_of(folder):
    """Return the files and contents that no reader may change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def fuzz(folder, seconds, seed):
    """Damage and read files for this time; return how often each was read."""
    draws, deadline, cases = random.Random(seed), time.monotonic() + seconds, {}
    known = readers(folder)
    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        while time.monotonic() < deadline:
            path = draws.choice(sorted(known))
            whole = path.read_bytes()
            path.write_bytes(damaged(whole, draws))
            state = state_of(folder)
            signal.alarm(SECONDS)
            try:
                known[path]()
            except ValueError as error:
                assert "\n" not in str(error), (path.name, str(error))
            except Exception as error:
                kept = Path(tempfile.mkdtemp(prefix="dicedist-fuzz-")) / path.name
                kept.write_bytes(path.read_bytes())
                raise AssertionError(f"{path.name}: {type(error).__name__}: {error} ({kept})") from error
            finally:
                signal.alarm(0)
            assert state_of(folder) == state, f"reading {path.name} has written something"
            path.write_bytes(whole)
            cases[path.name] = cases.get(path.name, 0) + 1
    finally:
        signal.signal(signal.SIGALRM, before)
    return cases


@pytest.fixture
def of_its_own(pristine, monkeypatch):
    monkeypatch.setenv("DICEDIST_DATA", str(pristine / "home"))
    return pristine


def test_damaged_files(of_its_own):
    assert sum(fuzz(of_its_own, 5, seed=7).values()) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_files_for_ten_minutes(of_its_own, tmp_path):
    assert sum(fuzz(of_its_own, 600, seed=tmp_path.name).values()) > 1000


if __name__ == "__main__":
    made = make(Path(tempfile.mkdtemp(prefix="dicedist-fuzz-")))
    os.environ["DICEDIST_DATA"] = str(made / "home")
    print(fuzz(made, float(sys.argv[1]), sys.argv[2]))
