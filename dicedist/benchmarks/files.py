"""Images per second and memory of data=files and data=shards, compared with torchvision's ImageFolder in a DataLoader.

Both sides decode the same boxes of the same files in the same order. Every alternative has its own process, as a rank
has. The processes take turns, so that a busy machine affects all of them equally.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F

from dicedist.benchmarks.data import cores, images_per_second, our_sizes, pipelines, their_sizes
from dicedist.benchmarks.processes import ask, start
from dicedist.cluster.devices import pick_device
from dicedist.cluster.process import tune_malloc
from dicedist.config import Config
from dicedist.config.schema import DataConfig
from dicedist.console.progress import Progress
from dicedist.data import sources
from dicedist.data.encoded import Encoded
from dicedist.data.order import num_batches
from dicedist.data.pack import pack
from dicedist.data.pipeline import Loader, RawEncoded
from dicedist.data.sources import Source

NUMBER, SIZE = 20_000, 224
CLASSES = 10
SIDES = (300, 700)  # pixels, at least and at most
SPELL, ROUNDS = 3.0, 5  # SPELL: seconds of one measurement of an alternative
FOLDER, SPEED, PEAK = "ImageFolder", "images/s", "peak MiB of the rank"
MIB = 2**20
Item = tuple[int, list[int], bool]  # place in the ImageFolder, box, flipped


def files(config: Config) -> list[dict[str, Any]]:
    """Compare on the images of data=files data.root=FOLDER, or on 20,000 (data.train_limit) generated photographs."""
    with tempfile.TemporaryDirectory(prefix="dicedist-") as scratch:
        os.environ["DICEDIST_DATA"] = scratch  # the lists of files are deleted with it
        data = replace(config.data, balance=False, per_member=False, split="full", augment="basic")
        if data.name != "files":
            root = Path(scratch) / "photographs"
            generate(root, data.train_limit or NUMBER)
            data = replace(data, name="files", root=str(root), size=SIZE, train_limit=None)
        elif not Path(str(data.root)).expanduser().is_dir():
            raise ValueError(f"data.root={data.root} is not a folder: write data.root=FOLDER")
        packed = Path(scratch) / "shards"
        pack(Path(str(data.root)).expanduser(), packed, 1000)
        settings = {"files": data, "shards": replace(data, name="shards", root=str(packed))}
        listed = [sources.load(each) for each in settings.values()]  # once for all processes
        read = {"MiB of the files": sum(map(os.path.getsize, paths_of(listed[0]))) / MIB}
        return [row | read for threads in (1, 2) for row in measured(settings, config.batch_size, threads)]


def paths_of(source: Source) -> list[str]:
    encoded = source.train.inputs_R
    assert isinstance(encoded, Encoded)
    return [encoded.name(row) for row in range(len(encoded))]


def measured(settings: dict[str, DataConfig], batch_size: int, threads: int) -> list[dict[str, Any]]:
    """Return a row for each alternative. The peak memory of a rank is read after it has read all images."""
    ours = [(kind, pipeline) for kind in settings for pipeline in pipelines(settings["files"])]
    ends, processes = {}, []
    with contextlib.ExitStack() as closing:
        for kind, name in [("files", FOLDER), *ours]:
            config = replace(settings[kind], pipeline="torch" if name == FOLDER else name, num_threads=threads)
            # Not a daemon, because a daemon cannot have workers.
            process, end = start("spawn", serve, name == FOLDER, config, batch_size, daemon=False)
            processes.append(process)
            ends[kind, name] = closing.enter_context(end)  # the process ends with it
        turns = [{place: ask(end, SPEED, " ".join(place)) for place, end in ends.items()} for _ in range(ROUNDS)]
        peaks = {place: ask(ends[place], PEAK, " ".join(place)) for place in ours}
    for process in processes:
        process.join()  # must not disturb the next measurement
    return [
        {
            "source": place[0],
            "pipeline": place[1],
            "threads": threads,
            f"times {FOLDER}": median(turn[place] / turn["files", FOLDER] for turn in turns),
            SPEED: median(turn[place] for turn in turns),
            PEAK: peaks.get(place),
        }
        for place in ends
    ]


def serve(theirs: bool, config: DataConfig, batch_size: int, requests: Connection) -> None:
    if not theirs:
        tune_malloc()
    with cores(config.num_threads):
        source = sources.load(config)
        if theirs:
            sizes = their_sizes(image_folder(source, config, batch_size))
        else:
            sizes = our_sizes(source, config, batch_size)
        answers = {
            SPEED: lambda: images_per_second(sizes, SPELL),
            PEAK: lambda: peak_of_an_epoch(sizes, len(source.train)) / MIB,
        }
        with contextlib.suppress(EOFError):
            while True:
                requests.send(answers[requests.recv()]())


def peak_of_an_epoch(sizes: Iterator[int], images: int) -> int:
    """Return the peak bytes of this process after it has read an epoch of images.

    Only Linux records the peak; other systems return the bytes at the end.
    """
    while images > 0:
        images -= next(sizes)
    if sys.platform == "linux":
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(held.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def image_folder(source: Source, config: DataConfig, batch_size: int) -> DataLoader:
    """Return a DataLoader as in most trainers, in this process or with one worker per thread of ours."""
    dataset = SameCrops(Path(str(config.root)).expanduser() / "train", source)
    order, workers = Order(dataset, config, batch_size), config.num_threads if config.num_threads > 1 else 0
    return DataLoader(
        dataset,
        batch_sampler=order,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )


class SameCrops(ImageFolder):
    """torchvision's functions, one image at a time, on given boxes instead of random ones."""

    def __init__(self, folder: Path, source: Source):
        super().__init__(str(folder))
        self.source = source

    def __getitem__(self, item: Item) -> tuple[Tensor, int]:
        place, (left, top, width, height), flipped = item
        path, label = self.samples[place]
        image = F.resized_crop(self.loader(path), top, left, height, width, [self.source.size] * 2)
        image = F.hflip(image) if flipped else image
        return F.normalize(F.to_tensor(image), list(self.source.mean), list(self.source.std)), label


class Order:
    """A batch sampler with the batches of our loader; each iteration is an epoch."""

    def __init__(self, dataset: SameCrops, config: DataConfig, batch_size: int):
        source = dataset.source
        self.ours, self.epoch = Loader(source.train, config, source, batch_size, 0, pick_device(), [0]), 0
        self.steps = range(num_batches(len(source.train), batch_size))
        self.places = {path: place for place, (path, _) in enumerate(dataset.samples)}

    def __iter__(self) -> Iterator[list[Item]]:
        for raw in self.ours.raw_batches(self.ours.planned(self.epoch), self.epoch):
            assert isinstance(raw, RawEncoded)
            places = [self.places[raw.images.name(row)] for row in raw.rows_B.tolist()]
            yield list(zip(places, raw.boxes_B4.tolist(), raw.drawn.flips_B.tolist(), strict=True))
        self.epoch += 1


def generate(root: Path, number: int) -> None:
    """Write JPEGs of mixed sizes, about 100 kB each, four of five for training: crops of canvases with fine texture."""
    rng = np.random.default_rng(0)
    canvases = [canvas(rng) for _ in range(8)]
    sides, corners = rng.integers(*SIDES, (number, 2)), rng.integers(0, SIDES[1], (number, 2))
    for split in ("train", "test"):
        for label in range(CLASSES):
            (root / split / f"class-{label}").mkdir(parents=True)

    def write(place: int) -> None:
        folder = root / ("test" if place % 5 == 4 else "train") / f"class-{place // 5 % CLASSES}"
        window = (*corners[place].tolist(), *(corners[place] + sides[place]).tolist())
        canvases[place % len(canvases)].crop(window).save(folder / f"{place:06}.jpg", quality=90)

    progress = Progress(number, "photographs made", stream=sys.stderr)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done, _ in enumerate(threads.map(write, range(number)), 1):
            progress.show(done)
    progress.clear()


def canvas(rng: np.random.Generator) -> Image.Image:
    side = 2 * SIDES[1]
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    grain = rng.normal(0, 14, (side, side, 1))
    smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
