"""Journeys of new users in a real bash: commands of README, docs and --help, made small by additional keys."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tests.support import CHECKOUT

# Four ResNet-8 at most, three steps, no images from the network.
SMALL = "network=resnet8 data.train_limit=96 batch_size=32 max_steps=3 log.every_steps=1"


class Shell:
    """A user's terminal: a home and a working folder whose names have spaces and umlauts."""

    def __init__(self, folder: Path):
        self.home, self.here = folder / "Zu Hause", folder / "meine Läufe"
        for made in (self.home, self.here):
            made.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "DICEDIST_"))}
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"HOME": str(self.home), "PATH": tools, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        self.environment = {**inherited, **own, "CUDA_VISIBLE_DEVICES": ""}

    def run(self, line: str, code: int = 0, **variables: str) -> str:
        """Standard output; standard error is the terminal's and must hold no traceback."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.here, capture_output=True, text=True, env=self.environment | variables
        )
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        self.told = done.stderr
        return done.stdout


def documented(start: str) -> str:
    """The one command in README, docs or a help text that begins so, without the remark behind it."""
    pages = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    texts += [import_module(f"dicedist.{name}").__doc__ or "" for name in ("evaluate", "predict", "report", "clean")]
    lines = [line.strip() for text in texts for line in [*text.splitlines(), *re.findall(r"`([^`\n]+)`", text)]]
    found = [re.split(r"\s{2,}#|\s{3,}(?![-'])", line)[0] for line in lines if line.startswith(start)]
    assert found, f"no page says {start} any more"
    return found[0]


def photos(root: Path, per_class: int = 16) -> list[str]:
    """Pictures of 40 to 300 pixels in several formats, some of them broken, in folders as people name them."""
    rng = np.random.default_rng(0)
    names = ["Quitten", "rote Birnen", "Äpfel"]
    for split in ("train", "test"):
        for kind, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                ending = ("jpg", "png", "JPG", "webp")[number % 4]
                picture(kind, rng).save(folder / f"Bild {number:02} é.{ending}")
    (root / "train" / names[0] / "kaputt.jpg").write_bytes(b"no image")
    (root / "train" / names[0] / "notes.txt").write_text("not an image")
    return names


def picture(kind: int, rng: np.random.Generator) -> Image.Image:
    width, height = (int(size) for size in rng.integers(40, 300, 2))
    blurred = Image.fromarray(rng.integers(0, 256, (5, 5, 3)).astype(np.uint8))
    image = blurred.resize((width, height), Image.Resampling.BICUBIC)
    side = 0.7 * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box, color = (left, top, left + side, top + side), tuple(int(value) for value in rng.integers(0, 256, 3))
    draw = ImageDraw.Draw(image)
    if kind == 0:
        draw.rectangle(box, fill=color)
    elif kind == 1:
        draw.polygon([(left + side / 2, top), (left + side, top + side), (left, top + side)], fill=color)
    else:
        draw.ellipse(box, fill=color)
    return image
