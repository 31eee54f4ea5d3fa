"""Files behind s3://, http:// and whatever else fsspec opens, copied to this machine."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from dicedist.cluster.heartbeat import advance
from dicedist.console.lines import printable, redacted
from dicedist.console.progress import Progress
from dicedist.data.prepared import write_synced

CHUNK = 2**22  # bytes copied at a time
STATE = ".copied.json"
GB = 1e9
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "s3", "https": "s3", "gs": "gs", "gcs": "gs"}  # scheme -> extra of the wheel
SHORTEST = 8  # characters of a secret
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


@dataclass(frozen=True)
class Remote:
    url: str
    files: Any  # fsspec's file system
    path: str

    @classmethod
    def at(cls, root: str) -> Self | None:
        """None for a path of this machine."""
        if "://" not in root:
            return None
        return cls(root, *open_url(root, f"data.root={redacted(root)}"))

    def copy_to(self, folder: Path, patterns: Sequence[str], names_file: str, more: str, most_gb: float) -> None:
        """Brings the folder to what is there: files of these patterns, and `more` if it exists. What is whole stays."""
        try:
            there = self.found(patterns, names_file)
            if self.files.exists(f"{self.path}/{more}"):
                there[more] = self.state_of(more)
            known = json.loads((folder / STATE).read_text()) if (folder / STATE).exists() else {}
            kept = {name for name, state in there.items() if known.get(name) == state and (folder / name).exists()}
            refuse_too_much(folder, there, kept, most_gb)
            for old in folder.iterdir():
                if old.name not in kept and not old.name.startswith("."):
                    old.unlink()
            self.copy(folder, {name: state for name, state in there.items() if name not in kept}, known)
        except Exception as error:  # the file systems of fsspec have errors of their own
            if not isinstance(error, OSError) and (isinstance(error, ValueError) or "." not in type(error).__module__):
                raise
            raise ValueError(f"data.root={redacted(self.url)} cannot be read: {reason_of(error)}") from error

    def found(self, patterns: Sequence[str], names_file: str) -> dict[str, list[Any]]:
        """The names of the files, from the list beside them if there is one: not every server can list a folder."""
        if self.files.exists(f"{self.path}/{names_file}"):
            names = self.files.cat_file(f"{self.path}/{names_file}").decode().split()
        else:
            names = [Path(entry).name for entry in self.files.ls(self.path, detail=False)]
        chosen = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
        return {name: self.state_of(name) for name in chosen if "/" not in name}

    def state_of(self, name: str) -> list[Any]:
        """What changes when a file is replaced."""
        return state_in(self.files.info(f"{self.path}/{name}"))

    def copy(self, folder: Path, wanted: dict[str, list[Any]], known: dict[str, Any]) -> None:
        progress = Progress(sum(size for size, _ in wanted.values()), "bytes of shards copied", stream=sys.stderr)
        done = 0
        for name, state in wanted.items():
            partial = folder / f".{name}.partial"
            with self.files.open(f"{self.path}/{name}", "rb") as source, partial.open("wb") as target:
                while chunk := source.read(CHUNK):
                    target.write(chunk)
                    done += len(chunk)
                    advance()
                    progress.show(done)
            if partial.stat().st_size != state[0]:
                raise ValueError(f"{redacted(self.url)}/{name} ended before its {state[0]:,} bytes: start again")
            partial.replace(folder / name)
            known[name] = state
            write_synced(folder / STATE, json.dumps(known))
        progress.clear()


def open_url(url: str, what: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. what: needs it, for the message if a package is missing."""
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
    """What counts of what fsspec says of a file: its size, and what changes when it is replaced."""
    return [int(info["size"] or 0), str(info.get("ETag") or info.get("LastModified") or info.get("mtime") or "")]


def reason_of(error: BaseException) -> str:
    """In one line, short, and without what the environment keeps secret."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    for name in SECRETS:
        if len(secret := os.environ.get(name, "")) >= SHORTEST:
            text = text.replace(secret, "***")
    return redacted(text)[:200]


def refuse_too_much(folder: Path, there: dict[str, list[Any]], kept: set[str], most_gb: float) -> None:
    whole = sum(size for size, _ in there.values())
    if whole > most_gb * GB:
        raise ValueError(
            f"the shards are {whole / GB:.3g} GB, more than data.cache_gb={most_gb:g}: raise it, or mount them as a "
            "folder"
        )
    wanted, free = whole - sum(there[name][0] for name in kept), shutil.disk_usage(folder).free
    if wanted > free:
        raise ValueError(f"{folder} has {free / GB:.3g} GB free of the {wanted / GB:.3g} needed: set DICEDIST_DATA")
