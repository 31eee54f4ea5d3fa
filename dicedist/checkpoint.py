"""Checkpoints: a folder each, a safetensors file per part, a manifest written last. No pickle is read or written.

runs/NAME/checkpoints/step-00001200/
    member-0.safetensors ... discriminator.safetensors     weights and optimiser state, named by what they are, not by
    rank manifest.json                                          step, and size and sha256 of each file
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dicedist.exchange import Exchange
from dicedist.parts import Part

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass
class Checkpoint:
    path: Path
    step: int
    parts: dict[str, dict]  # file name -> size, sha256


def folder(run: Path) -> Path:
    return run / "checkpoints"


def save(run: Path, step: int, parts: Sequence[Part], exchange: Exchange, keep: int) -> None:
    """All ranks call, each with the parts it answers for; rank 0 writes the manifest when all files are there."""
    final = folder(run) / f"step-{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    written = {}
    for part in parts:
        path = partial / f"{part.name}.safetensors"
        save_file(state(part), path)
        sync(path)
        written[path.name] = {"size": path.stat().st_size, "sha256": digest(path)}
    records = exchange.report(written)
    if records:
        manifest = {
            "format": FORMAT,
            "step": step,
            "parts": {name: entry for r in records for name, entry in r.items()},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync(partial / MANIFEST)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync(final.parent)
        for old in sorted(folder(run).glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    exchange.barrier()


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint whose files are all there and whole."""
    for path in sorted(folder(run).glob("step-*"), reverse=True):
        try:
            return read(path)
        except ValueError:
            continue
    return None


def read(path: Path) -> Checkpoint:
    """The manifest, its files checked; ValueError says which is missing or damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        checkpoint = Checkpoint(path, int(manifest["step"]), dict(manifest["parts"]))
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is missing or damaged") from error
    if version > FORMAT:
        raise ValueError(f"{path} was written by a newer dicedist (format {version}, this one reads {FORMAT})")
    for name, entry in checkpoint.parts.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{path} lacks {name}")
        if file.stat().st_size != entry["size"] or digest(file) != entry["sha256"]:
            raise ValueError(f"{file} is damaged: its contents are not those of the manifest")
    return checkpoint


def what_is_wrong(run: Path) -> str:
    """Why the newest checkpoint is not intact, for a message."""
    for path in sorted(folder(run).glob("step-*"), reverse=True):
        try:
            read(path)
        except ValueError as error:
            return f": {error}"
    return ""


def restore(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    for part in parts:
        tensors = load_part(checkpoint, part.name)
        load_weights(part.module, tensors, part.name)
        restore_optimizer(part, tensors)


def load_part(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    try:
        return load_file(checkpoint.path / f"{name}.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{checkpoint.path} has no {name} (of another method or ensemble size?)") from error


def load_weights(module: torch.nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    prefix = "weights."
    try:
        module.load_state_dict(
            {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        )
    except RuntimeError as error:
        raise ValueError(f"the checkpoint's {name} is of another network, method or number of classes") from error


def state(part: Part) -> dict[str, Tensor]:
    tensors = {f"weights.{name}": value for name, value in part.module.state_dict().items()}
    for name, parameter in part.module.named_parameters():
        for key, value in part.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
    return {name: value.detach().contiguous().cpu() for name, value in tensors.items()}


def restore_optimizer(part: Part, tensors: dict[str, Tensor]) -> None:
    parameters = dict(part.module.named_parameters())
    for full_name, value in tensors.items():
        kind, _, rest = full_name.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            like = parameters[name]
            if value.dim():  # counters stay where the optimiser expects them, on the CPU
                value = torch.empty_like(like).copy_(value)
            part.optimizer.state[like][key] = value


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
