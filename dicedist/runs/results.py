"""The results of an evaluation: several files that are written together.

evaluation.json is written last. It holds the digest of each other file, the step and the checkpoint. Readers refuse a
file with another digest. Writers hold a lock, and results of an earlier step never replace results of a later step
(`Findings.save`).
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from dicedist.config import Config
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.files import digest, draft_json, draft_tensors, publish, read_json, read_plain
from dicedist.runs.lock import locked

FILES = "files"  # the key of evaluation.json that holds the digests
LARGEST_TENSORS = 2**36  # bytes


class Inside:
    """The path of a file in a folder, as an attribute of the folder."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: "Results", kind: type) -> Path:
        return folder.directory / self.name


class Results:
    """The folder of an evaluation: the run's own, or a separate one."""

    result_file = Inside("evaluation.json")
    logits_file = Inside("logits.safetensors")
    gallery_file = Inside("gallery.safetensors")
    report_file = Inside("report.html")

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def files(self) -> list[Path]:
        """The files of the results, evaluation.json last."""
        return [self.logits_file, self.gallery_file, self.report_file, self.result_file]

    def result(self, step: int | None = None) -> dict[str, Any] | None:
        """Return the results; None if they do not exist, are damaged, or are of another step."""
        try:
            found = read_json(self.result_file)
        except (OSError, ValueError):
            return None
        return found if step in (None, found.get("step", step)) else None

    def tensors(self, path: Path, result: Mapping[str, Any]) -> dict[str, Tensor]:
        """Load the logits or the gallery of a result; ValueError if the file is of another evaluation.

        Results of earlier versions hold no digests.
        """
        content = read_plain(path, LARGEST_TENSORS)
        if not is_named(result, path, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{path} is not of the evaluation in {self.result_file.name}: evaluate again")
        try:
            return load(content)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: evaluate again") from error

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Let one process at a time write results to this folder. Create the folder if needed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return locked(self.directory / ".results.lock")

    def write_result(
        self,
        result: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        gallery: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write all files under temporary names first, so that a full disk leaves the earlier results intact."""
        self.directory.mkdir(parents=True, exist_ok=True)
        given = {path: values for path, values in ((self.logits_file, tensors), (self.gallery_file, gallery)) if values}
        drafts = {path: draft_tensors(values, path) for path, values in given.items()}
        digests = {FILES: {path.name: digest(draft) for path, draft in drafts.items()}} if drafts else {}
        drafts[self.result_file] = draft_json({**result, **digests}, self.result_file)
        publish(drafts)

    def aside(self, step: int) -> "Results":
        """Return the folder for results of an earlier step, which must not replace the later ones."""
        return Results(self.directory.with_name(f"{self.directory.name}_step-{step}"))


def is_named(result: Mapping[str, Any], path: Path, sha256: str | None = None) -> bool:
    """Return whether a result names this file and, if given, this digest."""
    if FILES not in result:
        return True
    named = result[FILES].get(path.name) if isinstance(result[FILES], dict) else None
    return named is not None and sha256 in (None, named)


def origin(config: Config, found: Checkpoint) -> dict[str, str]:
    """Return the entries of evaluation.json that identify the evaluated weights."""
    return {"checkpoint": found.sha256, "weights": "ema" if config.uses_average else "last"}
