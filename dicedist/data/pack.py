"""Make shards of a folder of images. A shard gets its final name when it is complete."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import torch

from dicedist.algorithm.randomness import generator
from dicedist.data.prepared import write_synced
from dicedist.data.reading import shown
from dicedist.data.sets.folder import from_splits
from dicedist.data.sets.shards import CLASSES, SHARDS

PLAN = "pack.json"


def pack(folder: Path, output: Path, per_shard: int) -> int:
    """Write the missing shards and return their number. Shards of an earlier, interrupted call stay.

    Images are shuffled, so that some of the shards are a fair sample of the data.
    """
    class_names, files = from_splits(folder)
    sizes = [[(str(path), label, (folder / path).stat().st_size) for path, label in found] for found in files.values()]
    digest = hashlib.blake2b(repr(sizes).encode(), digest_size=16).hexdigest()
    plan = json.dumps({"images": digest, "per_shard": per_shard})
    output.mkdir(parents=True, exist_ok=True)
    if (output / PLAN).exists() and (output / PLAN).read_text() != plan:
        raise ValueError(f"{output} holds shards of other images or of another size: name an empty folder")
    if not (output / PLAN).exists() and any(output.glob("*.tar")):
        raise ValueError(f"{output} holds shards that were not packed here: name an empty folder")
    write_synced(output / PLAN, plan)
    write_synced(output / CLASSES, "\n".join(class_names) + "\n")
    shards = {}
    for split, found in files.items():
        order = torch.randperm(len(found), generator=generator("cpu", 0, "pack")).tolist()
        for number, start in enumerate(range(0, len(found), per_shard)):
            shards[f"{split}-{number:06}.tar"] = [found[row] for row in order[start : start + per_shard]]
    missing = {name: found for name, found in shards.items() if not (output / name).exists()}
    for name, found in shown(missing.items(), len(shards), "shards packed", len(shards) - len(missing)):
        write_shard(folder, output / name, found)
    write_synced(output / SHARDS, "\n".join(shards) + "\n")
    return len(missing)


def write_shard(folder: Path, path: Path, found: Sequence[tuple[Path, int]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
        for place, (file, label) in enumerate(found):
            key = f"{path.stem.partition('-')[2]}-{place:06}"
            add(tar, key + file.suffix.lower(), (folder / file).read_bytes())
            add(tar, f"{key}.cls", str(label).encode())
    partial.replace(path)


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file without owner and time: the same images make the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
