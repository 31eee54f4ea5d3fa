"""Copy files from s3://, http:// and other addresses that fsspec can open to this machine."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dicedist.cluster.heartbeat import advance
from dicedist.console.lines import redacted
from dicedist.console.progress import Progress
from dicedist.data.prepared import write_synced
from dicedist.data.reading import reason

CHUNK = 2**22  # bytes copied at a time
STATE = ".copied.json"
GB = 1e9
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "s3", "https": "s3", "gs": "gs", "gcs": "gs"}  # scheme -> extra of the wheel
SHORTEST = 8  # shortest secret that is hidden in messages
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


def copy_remote(url: str, folder: Path, patterns: Sequence[str], names_file: str, more: str, most_gb: float) -> None:
    """Copy the files at the URL that match the patterns, and `more` if it exists. Complete copies are kept."""
    files, path = open_url(url, f"data.root={redacted(url)}")
    try:
        # Some servers cannot list a folder. Then a file next to the others names them.
        if files.exists(f"{path}/{names_file}"):
            names = files.cat_file(f"{path}/{names_file}").decode().split()
        else:
            names = [Path(entry).name for entry in files.ls(path, detail=False)]
        chosen = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
        chosen = [name for name in chosen if "/" not in name] + [more] * files.exists(f"{path}/{more}")
        there = {name: state_in(files.info(f"{path}/{name}")) for name in chosen}
        known = json.loads((folder / STATE).read_text()) if (folder / STATE).exists() else {}
        kept = {name for name, state in there.items() if known.get(name) == state and (folder / name).exists()}
        wanted = {name: state for name, state in there.items() if name not in kept}
        whole, new = (sum(size for size, _ in of.values()) for of in (there, wanted))
        refuse_too_much(folder, whole, new, most_gb)
        for old in folder.iterdir():
            if old.name not in kept and not old.name.startswith("."):
                old.unlink()
        copy(files, path, folder, wanted, known)
    except Exception as error:  # the file systems of fsspec have errors of their own
        if not isinstance(error, OSError) and (isinstance(error, ValueError) or "." not in type(error).__module__):
            raise
        raise ValueError(f"data.root={redacted(url)} cannot be read: {reason_of(error)}") from error


def refuse_too_much(folder: Path, whole: int, wanted: int, most_gb: float) -> None:
    if whole > most_gb * GB:
        gb = f"{whole / GB:.3g} GB, more than data.cache_gb={most_gb:g}"
        raise ValueError(f"the shards are {gb}: raise it, or mount them as a folder")
    if wanted > (free := shutil.disk_usage(folder).free):
        raise ValueError(f"{folder} has {free / GB:.3g} GB free of the {wanted / GB:.3g} needed: set DICEDIST_DATA")


def copy(files: Any, path: str, folder: Path, wanted: dict[str, list[Any]], known: dict[str, Any]) -> None:
    progress = Progress(sum(size for size, _ in wanted.values()), "bytes of shards copied", stream=sys.stderr)
    done = 0
    for name, state in wanted.items():
        partial = folder / f".{name}.partial"
        with files.open(f"{path}/{name}", "rb") as source, partial.open("wb") as target:
            while chunk := source.read(CHUNK):
                target.write(chunk)
                done += len(chunk)
                advance()
                progress.show(done)
        if partial.stat().st_size != state[0]:
            raise ValueError(f"{redacted(path)}/{name} ended before its {state[0]:,} bytes: start again")
        partial.replace(folder / name)
        known[name] = state
        write_synced(folder / STATE, json.dumps(known))
    progress.clear()


def open_url(url: str, what: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. what: the user's setting, for messages."""
    scheme = url.partition("://")[0]
    extra = EXTRAS.get(scheme, "s3")
    if find_spec("fsspec") is None:
        raise ValueError(f"{what} needs fsspec: pip install 'dicedist[{extra}]'")
    try:
        files, path = import_module("fsspec").core.url_to_fs(url, **options)
    except ImportError as error:
        remedy = f": pip install 'dicedist[{extra}]'" if scheme in EXTRAS else ""
        raise ValueError(f"{what} needs a package ({reason_of(error)}){remedy}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {reason_of(error)}; write s3://BUCKET/..., or what else fsspec opens") from error
    return files, path.rstrip("/")


def state_in(info: Mapping[str, Any]) -> list[Any]:
    """Return the size of a file, and a mark that changes when the file is replaced, from the answer of fsspec."""
    return [int(info["size"] or 0), str(info.get("ETag") or info.get("LastModified") or info.get("mtime") or "")]


def reason_of(error: BaseException) -> str:
    """Return one short line without the secrets of the environment."""
    text = reason(error)
    for name in SECRETS:
        if len(secret := os.environ.get(name, "")) >= SHORTEST:
            text = text.replace(secret, "***")
    return redacted(text)[:200]
