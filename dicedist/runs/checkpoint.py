"""Checkpoints: one folder each, one safetensors file per part, a manifest written last. No pickle is read or written.

checkpoints/step-00001200/
    member-0.safetensors ... discriminator.safetensors   weights, moving average and optimizer state of a part, the
                                                         same for any placement
    manifest.json                                        step, size and sha256 of each file, other state of the run

A folder is renamed from .step-00001200.partial when it is complete and on disk.
"""

import contextlib
import gzip
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dicedist.algorithm.parts import Part, followed
from dicedist.runs.files import digest, digest_of, dump_checked, load_checked, read_plain, save_tensors, sync

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**24  # bytes
WEIGHTS = "weights."
AVERAGE = "average."  # the state of a MovingAverage
AVERAGED_WEIGHTS = f"{AVERAGE}module."
OPTIMIZERS = ("optimizer", "second")  # names of the states of a part's optimizers
RECORDS = "records"  # the part that holds metrics.jsonl up to the checkpoint
RISEN = 2.0  # times the lowest loss so far
FILE_NAME = re.compile(r"[a-z0-9-]+\.safetensors")  # no path, so it cannot point outside the folder
Tensors = dict[str, Tensor]
Files = dict[str, tuple[int, str]]  # file name -> size, sha256


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    files: Files
    about: dict[str, Any]  # state of the run besides its parts

    @property
    def complete(self) -> bool:
        """Return whether this is the checkpoint of the last step."""
        return self.step >= self.about.get("total_steps", self.step)

    @property
    def sha256(self) -> str:
        """Digest of all parts. It identifies the weights; the records may differ."""
        return digest_of({name: entry for name, entry in self.files.items() if name != f"{RECORDS}.safetensors"})


def snapshot(part: Part) -> Tensors:
    """Copy a part to the host, so that training can continue."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state(part).items()}


def write_part(directory: Path, name: str, tensors: Tensors) -> Files:
    """Write a part on the rank that saves it. Return its entry in the manifest."""
    broken = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{name} holds values that are not finite, {broken[0]} is the first")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.safetensors"
    save_tensors(tensors, path)
    return {path.name: (path.stat().st_size, digest(path))}


def complete(
    folder: Path, step: int, files: Files, about: Mapping[str, Any], keep: int, spared: Path | None = None
) -> None:
    """Write the manifest, rename the folder and remove old checkpoints, on rank 0 after all ranks have written.

    spared: a checkpoint in use, which is not removed this time.
    """
    draft = partial(folder, step)
    if missing := [name for name in files if not (draft / name).is_file()]:
        raise FileNotFoundError(f"{draft / missing[0]} is not there, though the rank that wrote it shares this folder")
    entries = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in files.items()}
    manifest = {"format": FORMAT, "step": step, "files": entries, "about": about}
    publish(folder, step, dump_checked(manifest).encode())
    losses = {step_of(path): loss_in(manifest_in(path)) for path in saved(folder)}
    for old in superfluous(losses, step, keep, best_step(about)):
        if path_of(folder, old) != spared:
            shutil.rmtree(path_of(folder, old), ignore_errors=True)


def publish(folder: Path, step: int, manifest: bytes) -> None:
    """Write the manifest of a checkpoint and rename its folder. A damaged checkpoint of this step is replaced."""
    draft, final = partial(folder, step), path_of(folder, step)
    (draft / MANIFEST).write_bytes(manifest)
    sync(draft / MANIFEST)
    sync(draft)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    sync(folder)


def best_step(about: Mapping[str, Any]) -> int | None:
    """Return the step of the best validation from a manifest; None if the run keeps no best checkpoint."""
    best = about.get("best")
    return int(best["step"]) if best else None


def superfluous(losses: Mapping[int, float | None], last: int, keep: int, best: int | None = None) -> list[int]:
    """Return the steps of the checkpoints to remove.

    Kept are the last `keep` ones, the one of the best validation, and the last one before the loss rose, to which a
    diverging run can go back. losses: by step. The run has gone back to `last`, so later checkpoints are removed.
    """
    before = sorted(step for step in losses if step <= last)
    known = {step: loss for step in before if (loss := losses[step]) is not None}
    calm = [step for step, loss in known.items() if loss <= RISEN * min(known.values())]
    stay = {*before[-keep:], *calm[-1:], best}
    return [step for step in sorted(losses) if step not in stay]


def loss_in(manifest: bytes) -> float | None:
    try:
        return json.loads(manifest)["about"]["loss"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def discard(folder: Path) -> None:
    """Remove incomplete checkpoints."""
    for path in folder.glob(".step-*.partial"):
        if path.is_symlink():
            path.unlink()  # a link could lead out of this folder
        shutil.rmtree(path, ignore_errors=True)


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, the newest first, so that a crash leaves a valid run of fewer steps."""
    for path in reversed([path for path in saved(folder) if step_of(path) > step]):
        shutil.rmtree(path)
    sync(folder)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def partial(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.partial"


def saved(folder: Path) -> list[Path]:
    """Return the completed checkpoints in the order of their steps."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def newest(folder: Path, warn: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
    """Return the last intact checkpoint. Warn about later ones with missing or damaged files."""
    for path in reversed(saved(folder)):
        try:
            return read(path)
        except NewerFormat:
            raise
        except ValueError as error:
            warn(str(error))
    return None


def what_is_wrong(folder: Path) -> str:
    """Return the reason why the newest checkpoint is not intact, as the end of a message."""
    reasons: list[str] = []
    newest(folder, reasons.append)
    return f": {reasons[0]}" if reasons else ""


class NewerFormat(ValueError):
    """A checkpoint of a newer version. It is not damaged, so no earlier one may replace it."""


def read(path: Path, only: Collection[str] | None = None, expected: int | None = None) -> Checkpoint:
    """Read the manifest, and check the files of all (or `only` some) parts against it; ValueError names a mismatch.

    expected: the step that the manifest must name; by default the step in the folder's name.
    """
    checkpoint = described(manifest_in(path), path, step_of(path) if expected is None else expected)
    for name, (size, sha256) in checkpoint.files.items():
        if only is None or name.removesuffix(".safetensors") in only:
            verify(path, name, size, sha256)
    return checkpoint


def described(text: bytes, path: Path, expected: int) -> Checkpoint:
    """Return the checkpoint that a manifest describes, without a check of its files. path: folder of the files."""
    try:
        manifest = load_checked(text)
        version, step = int(manifest["format"]), int(manifest["step"])
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        checkpoint = Checkpoint(path, step, files, dict(manifest["about"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST} is missing or damaged") from error
    if version > FORMAT:
        raise NewerFormat(f"{path} was written by a newer dicedist (format {version}, this one reads {FORMAT})")
    if step != expected:
        raise ValueError(f"{path} holds step {step}, which is not the step that it is named for")
    if strange := [name for name in files if not FILE_NAME.fullmatch(name)]:
        raise ValueError(f"{path / MANIFEST} names {strange[0]!r}, which is no file of this folder")
    return checkpoint


def manifest_in(path: Path) -> bytes:
    """Return the text of the manifest; empty if the manifest is missing, too large or no plain file."""
    with contextlib.suppress(OSError, ValueError):
        return read_plain(path / MANIFEST, MANIFEST_LIMIT)
    return b""


def verify(path: Path, name: str, size: int, sha256: str) -> None:
    file = path / name
    if file.is_symlink():
        raise ValueError(f"{path / MANIFEST} names {name!r}, which is no file of this folder")
    if not file.is_file():
        raise ValueError(f"{path} lacks {name}")
    if file.stat().st_size != size or digest(file) != sha256:
        raise ValueError(f"{file} is damaged: its contents are not those of the manifest")


def restore(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    for part in parts:
        tensors = tensors_of(checkpoint, part.name, part.module)
        part.module.load_state_dict(of_kind(WEIGHTS, tensors))
        load_optimizer(part, tensors)
        # If the checkpoint has no moving average, the average starts with the weights of the next step.
        if part.average is not None and (average := of_kind(AVERAGE, tensors)):
            part.average.load_state_dict(average)


def tensors_of(checkpoint: Checkpoint, name: str, module: nn.Module | None = None) -> Tensors:
    """Load the tensors of a part. module: its names and shapes are compared with the file before loading."""
    path = checkpoint.path / f"{name}.safetensors"
    if path.name not in checkpoint.files:
        raise ValueError(f"{checkpoint.path} has no {name}: it is of another method or ensemble size")
    try:
        with safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
            if module is not None and not fits(shapes, module):
                raise ValueError(f"{path} is of another network, method or number of classes")
            return {key: file.get_tensor(key) for key in shapes}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: it is not a safetensors file") from error


def fits(shapes: Mapping[str, tuple[int, ...]], module: nn.Module) -> bool:
    """Return whether these are the shapes of a saved module.

    A file holds all weights of the module, all or none of their moving averages, and values of optimizers.
    """
    weights, averages = (
        {f"{prefix}{name}": tuple(value.shape) for name, value in own.state_dict().items()}
        for prefix, own in ((WEIGHTS, module), (AVERAGED_WEIGHTS, followed(module)))
    )
    averages[f"{AVERAGE}n_averaged"] = ()
    wanted = weights | (averages if averages.keys() & shapes.keys() else {})
    parameters = {name: tuple(value.shape) for name, value in module.named_parameters()}
    others = {tuple(key.split(".", 2)): shape for key, shape in shapes.items() if key not in wanted}
    return wanted.items() <= shapes.items() and all(
        len(key) == 3 and key[0] in OPTIMIZERS and shape in ((), parameters.get(key[2]))
        for key, shape in others.items()
    )


def of_kind(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_optimizer(part: Part, tensors: Tensors) -> None:
    parameters = dict(part.module.named_parameters())
    for full_name, value in tensors.items():
        kind, *rest = full_name.split(".", 2)
        optimizer = part.optimizers.get(kind)
        if optimizer is not None:
            key, name = rest
            like = parameters[name]
            if value.dim():
                value = torch.empty_like(like).copy_(value)
            elif optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"):  # others count on the CPU
                value = value.to(like.device)
            optimizer.state[like][key] = value


def state(part: Part) -> Tensors:
    tensors = {f"{WEIGHTS}{name}": value for name, value in part.module.state_dict().items()}
    if part.average is not None:
        tensors |= {f"{AVERAGE}{name}": value for name, value in part.average.state_dict().items()}
    for kind, optimizer in part.optimizers.items():
        for name, parameter in part.module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}.{key}.{name}"] = value
    return tensors


def pack_records(text: bytes) -> Tensors:
    return {"jsonl_gz": torch.frombuffer(bytearray(gzip.compress(text, mtime=0)), dtype=torch.uint8)}


def unpack_records(checkpoint: Checkpoint) -> bytes | None:
    """Return metrics.jsonl as of the checkpoint; None if an earlier version wrote the checkpoint without it."""
    if f"{RECORDS}.safetensors" not in checkpoint.files:
        return None
    return gzip.decompress(tensors_of(checkpoint, RECORDS)["jsonl_gz"].numpy().tobytes())
