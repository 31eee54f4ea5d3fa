"""Copy a run from a bucket to the disk, to resume it on another machine or to read it.

A bucket may come from somebody else. So file names must be known or match a pattern, sizes are checked before anything
is copied, and no tensor is used before its digest matches the manifest.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from dicedist.data.prepared import home
from dicedist.data.remote import reason_of
from dicedist.runs import checkpoint
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import MANIFEST, MANIFEST_LIMIT, NewerFormat
from dicedist.runs.files import sync
from dicedist.runs.lock import locked
from dicedist.runs.run import Run

LIKE = Run("")  # for the names of files
LABEL = re.compile(r"[\w,=+-][\w.,=+-]*")
LARGEST = 2**33  # bytes of a file outside checkpoints
STATE = ".copied.json"
Listing = dict[str, list[Any]]  # Bucket.listed()


def copy_of(bucket: Bucket) -> Path:
    """Copy all of the run but its checkpoints to a folder of this machine, and return the folder.

    Files that changed in the bucket are copied again. Files that commands added to the folder stay.
    """
    try:
        there = bucket.listed()
    except FileNotFoundError as error:
        raise ValueError(f"{bucket} cannot be read: {reason_of(error)}") from error
    if name_of(LIKE.config_file) not in there:
        raise ValueError(f"{bucket} is not a run: it has no {LIKE.config_file.name}")
    digest = hashlib.sha256(bucket.url.encode()).hexdigest()[:16]
    folder = home() / "runs" / digest / bucket.path.rpartition("/")[2]
    with alone(folder):
        state, run = folder / STATE, Run(folder)
        known = json.loads(state.read_text()) if state.is_file() else {}
        for name in names_of(known):
            if name not in there:  # the run continued, and its earlier results moved
                run.place_of(name).unlink(missing_ok=True)
        bring_files(bucket, run, {name: there[name] for name in there if known.get(name) != there[name]})
        state.write_text(json.dumps(there))
    return folder


def alone(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a folder, so that the ranks of one machine copy to it one after another."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return locked(folder.parent / ".lock")


def bring_files(bucket: Bucket, run: Run, there: Listing) -> None:
    """Replace the run's files in the folder by the files of the bucket."""
    for name in names_of(there):
        size, target = there[name][0], run.place_of(name)
        if size > LARGEST:
            raise ValueError(f"{bucket}/{name} has {size:,} bytes, more than the {LARGEST:,} allowed")
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.partial")
        draft.unlink(missing_ok=True)
        bucket.take(name, draft, size)
        draft.replace(target)


def names_of(there: Collection[str]) -> list[str]:
    """Return the names of a run's files without its checkpoints, in the order of sending."""
    results, (folder, _) = {path.name for path in LIKE.files}, LIKE.variation("label").directory.parts
    aside = [name for name in sorted(there) if (parts := name.split("/"))[0] == folder and len(parts) == 3]
    aside = [name for name in aside if LABEL.fullmatch(name.split("/")[1]) and name.split("/")[2] in results]
    return [name for path in LIKE.files_to_send if (name := name_of(path)) in there] + aside


def fetch_newest(bucket: Bucket, run: Run, warn: Callable[[str], None], only: int | None = None) -> None:
    """Copy the newest intact checkpoint and the best one that it names, unless the disk has them or later ones.

    only: copy the checkpoint of this step, if it exists.
    """
    held, known = checkpoint.newest(run.checkpoints), manifests(bucket, bucket.listed())
    for step, text in sorted(known.items(), reverse=True):
        if only not in (None, step) or (held is not None and only is None and held.step >= step):
            continue
        try:
            best = checkpoint.best_step(checkpoint.described(text, Path(str(bucket)), step).about)
            if best in known and best != step and not checkpoint.path_of(run.checkpoints, best).exists():
                fetch(bucket, run, best, known[best])
            return fetch(bucket, run, step, text)
        except NewerFormat:
            raise
        except (ValueError, FileNotFoundError) as error:
            warn(f"{error}; the checkpoint before it is tried")


def manifests(bucket: Bucket, there: Collection[str]) -> dict[int, bytes]:
    """Return the manifests of the checkpoints in the bucket, by step."""
    steps = {step for name in there if (step := step_in(name)) is not None and name.endswith(f"/{MANIFEST}")}
    found = {step: bucket.read(f"{folder_of(step)}/{MANIFEST}", MANIFEST_LIMIT) for step in steps}
    return {step: text for step, text in found.items() if text is not None}


def fetch(bucket: Bucket, run: Run, step: int, text: bytes) -> None:
    """Copy one checkpoint; ValueError if a file does not match the manifest."""
    origin, draft = bucket.inside(folder_of(step)), checkpoint.partial(run.checkpoints, step)
    found = checkpoint.described(text, Path(str(origin)), step)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, (size, sha256) in found.files.items():
        if origin.take(name, draft / name, size) != sha256:
            raise ValueError(f"{origin}/{name} is damaged: its contents are not those of the manifest")
        sync(draft / name)
    checkpoint.publish(run.checkpoints, step, text)


def folder_of(step: int) -> str:
    return name_of(checkpoint.path_of(LIKE.checkpoints, step))


def step_in(name: str) -> int | None:
    """Return the step of the checkpoint that holds this file of a bucket; None for other files."""
    folder, _, rest = name.partition("/")
    found = re.fullmatch(r"step-(\d{8,})/[^/]+", rest)
    return int(found[1]) if found and folder == LIKE.checkpoints.name else None


def name_of(path: Path) -> str:
    """Return the name in a bucket for a path of LIKE."""
    return path.as_posix()
